"""What a verify step is made of: each op of it alone, in a CUDA graph, at the step's sizes.

Owns how often a step runs an op. Does not own the ops' cases and how they are timed (benchmarks.kernels_*).
The sum of the parts and the step's own device time differ by what lies between launches: a stage, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import kernels_attention, kernels_choice, kernels_small
from benchmarks.gpu.clock import Timed
from benchmarks.gpu.floor import products_ms, target_bytes
from benchmarks.gpu.setup import Case, Setup, Stage
from kernels.linear import PackedLinear
from kernels.ragged import TREE
from kernels.ragged_attention import Window


def verify_stages(setup: Setup, timed: Timed, linears: Sequence[PackedLinear]) -> list[Stage]:
    """The stages of the step `setup.told`, which took `timed`. On a GPU only."""
    case, rates = setup.told, setup.rates
    sizes = target_bytes(setup.config, setup.act)
    products = products_ms(linears, case.rows, dtype=setup.act, device=setup.device, repeats=setup.repeats)
    small = small_ops_ms(setup, case)
    choice = kernels_choice.choice(case.rows, 0.0, setup.config.vocab_size, setup.act, str(setup.device))
    walk = kernels_choice.walked(case.sessions, case.nodes, str(setup.device))
    stages = [
        Stage("verify: products", rates.read_ms(sizes.matrices + sizes.head), products),
        Stage(
            "verify: attention",
            rates.read_ms(case.sessions * case.context * sizes.kv_per_token),
            attention_ms(setup, case),
        ),
        Stage(
            "verify: norms, heads, activation",
            rates.read_ms(sizes.norms),
            sum(small[op] for op in ("add_rms_norm", "split_heads", "silu_mul")),
        ),
        Stage("verify: choice", 0.0, kernels_small.replay_us([choice.run]) / 1e3),
        Stage(
            "verify: walk, commit, capture",
            0.0,
            kernels_small.replay_us([walk.run]) / 1e3 + small["commit_rows"] + small["publish_rows"],
        ),
    ]
    known = sum(stage.ms for stage in stages)
    stages.append(Stage("verify: inputs, embedding, between launches", 0.0, timed.device_ms - known))
    stages.append(Stage("verify: host", 0.0, timed.host_ms - timed.device_ms))
    return stages


def attention_ms(setup: Setup, case: Case) -> float:
    """Attention of all layers and its plans, once a step."""
    config, total = setup.config, 0.0
    model = kernels_attention.Model(config.num_heads, config.num_kv_heads, config.head_dim)
    for window in dict.fromkeys(config.windows):
        shape = kernels_attention.Shape(
            "step", model, TREE, case.sessions, case.nodes + 1, (case.context,), Window(rows=window)
        )
        layer_s, plan_s = kernels_attention.Prepared(shape).time(kernels_attention.tabled(shape))
        total += (layer_s * config.windows.count(window) + plan_s) * 1e3
    return total


def small_ops_ms(setup: Setup, case: Case) -> dict[str, float]:
    """ms a step spends in each of the small kernels, by its name."""
    config = setup.config
    shape = kernels_small.Shape(
        "step", config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim,
        config.intermediate_size, config.num_layers, config.qk_norm, taps=max(len(setup.taps), 1),
    )  # fmt: skip
    layers = config.num_layers
    times = {"add_rms_norm": 2 * layers, "split_heads": layers, "silu_mul": layers, "commit_rows": 1,
             "publish_rows": 1 if case.captured else 0}  # fmt: skip
    found = {}
    for make in kernels_small.cases(shape, case.rows, setup.act, setup.device):
        made = make()
        if made.op in times:
            found[made.op] = kernels_small.replay_us([made.run]) * times[made.op] / 1e3
    return found
