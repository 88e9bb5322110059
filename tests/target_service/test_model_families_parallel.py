"""Every family on 2, 4 and 8 ranks: the logits, hidden states and commits of transformers' model.

The ranks are threads of this process, with the real groups, messages and shards; test_model_parallel.py has
the same over processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tm
import torch
from thread_ranks import thread_ranks

from target_service.runner import Runner, load_runner

MODELS = {
    "Llama": ("llama-2kv-of-8", {}),
    "Qwen2": ("qwen2", {"num_attention_heads": 8, "num_hidden_layers": 2}),
    "Qwen3": ("qwen3-2kv-of-8", {}),
}
TOKENS = torch.randint(0, tm.VOCAB, (40,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module", params=MODELS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    name, changes = MODELS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    return folder, tm.build(name, folder, dtype=torch.float64, **changes)


@pytest.fixture(params=[1, 2, 4, 8])
def runner(request: pytest.FixtureRequest, family: tuple[Path, Any]) -> Iterator[Runner]:
    model = {"dtype": "float64", "num_pages": 32, "page_size": tm.PAGE, "max_rows": 64}
    size = request.param
    one = size == 1
    with (
        load_runner(family[0], device="cpu", **model)
        if one
        else thread_ranks(family[0], size, **model) as made
    ):
        assert made.tp_size == size
        yield made


def test_prompt_taps_and_an_accepted_path(runner: Runner, family: tuple[Path, Any]) -> None:
    """A prompt in chunks, then a tree of which one path is committed, then a row that sees it."""
    prompt, pages, parents = TOKENS[:21], tm.pages_for(40), (-1, 0, 0, 2, 2, 4)
    runner.set_taps((0, 1), normed_last_layer=True)
    outputs = tm.feed(runner, prompt, pages, chunks=(9, 7, 1))
    tree = tm.accepted_tree(runner, TOKENS[30:36], parents, 21, pages, [0, 2, 4, 5])
    runner.run(tm.tree_step([(tree, parents, 21, pages)], commit=True))
    outputs.append(runner.run(tm.chain_step([TOKENS[37]], 25, pages)))
    text = [*prompt, tree[0], tree[2], tree[4], tree[5], TOKENS[37]]
    with torch.inference_mode():
        expected = family[1](torch.tensor([text]), output_hidden_states=True)
    rows = [*range(21), 25]
    got = torch.cat([o.logits for o in outputs])
    torch.testing.assert_close(got, expected.logits[0, rows].float(), atol=2e-5, rtol=2e-5)
    taps = torch.cat([o.taps for o in outputs if o.taps is not None])
    states = torch.cat([state[0, rows] for state in expected.hidden_states[1:]], -1)
    torch.testing.assert_close(taps, states, atol=2e-5, rtol=2e-5)
