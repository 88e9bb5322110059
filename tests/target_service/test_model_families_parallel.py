"""Every family on 2, 4 and 8 ranks: the logits, hidden states and commits of transformers' model.

The ranks are threads of this process, with the real groups, messages and shards; test_model_parallel.py has
the same over processes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tm
import torch

from target_service import step_codec
from target_service.model.config import ModelConfig
from target_service.model.shard import ModelShard, ShardSpec
from target_service.parallel import RankGroup, Rendezvous, SingleRank, open_store
from target_service.runner import Runner
from target_service.step import Commit
from target_service.worker import serve

MODELS = {
    "Llama": ("llama-2kv-of-8", {}),
    "Qwen2": ("qwen2", {"num_attention_heads": 8, "num_hidden_layers": 2}),
    "Qwen3": ("qwen3-2kv-of-8", {}),
}
TOKENS = torch.randint(0, tm.VOCAB, (40,), generator=torch.Generator().manual_seed(0)).tolist()
CPU = torch.device("cpu")


class ThreadPool:
    """Ranks 1..size-1 as threads, in the place of target_service.worker.WorkerPool."""

    def __init__(self, spec: ShardSpec, config: ModelConfig, size: int) -> None:
        store = open_store(size, 60.0)
        rendezvous = Rendezvous(int(store.port), size)
        self._threads = [
            threading.Thread(target=self._work, args=(spec, config, rendezvous, rank), daemon=True)
            for rank in range(1, size)
        ]
        for thread in self._threads:
            thread.start()
        self.group = RankGroup(rendezvous, 0, device=CPU, timeout_s=60.0, store=store)

    def _work(self, spec: ShardSpec, config: ModelConfig, rendezvous: Rendezvous, rank: int) -> None:
        group = RankGroup(rendezvous, rank, device=CPU, timeout_s=60.0)
        serve(group.broadcast_message, ModelShard(spec, config, group))
        group.close()

    def send(self, message: torch.Tensor) -> None:
        self.group.broadcast_message(message)

    def explained(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def close(self) -> None:
        self.send(step_codec.encode_stop())
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()
        self.group.close()


@pytest.fixture(scope="module", params=MODELS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    name, changes = MODELS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    return folder, tm.build(name, folder, dtype=torch.float64, **changes)


@pytest.fixture(params=[1, 2, 4, 8])
def runner(request: pytest.FixtureRequest, family: tuple[Path, Any]) -> Iterator[Runner]:
    folder, size = family[0], request.param
    config = ModelConfig.from_folder(folder)
    spec = ShardSpec(folder, "cpu", torch.float64, 32, tm.PAGE, 64)
    pool: Any = None if size == 1 else ThreadPool(spec, config, size)
    shard = ModelShard(spec, config, SingleRank() if pool is None else pool.group)
    with Runner(config, shard, spec, "", pool) as made:
        assert made.tp_size == size
        yield made


def test_prompt_taps_and_an_accepted_path(runner: Runner, family: tuple[Path, Any]) -> None:
    """A prompt in chunks, then a tree of which one path is committed, then a row that sees it."""
    prompt, tree, pages = TOKENS[:21], TOKENS[30:36], tm.pages_for(40)
    runner.set_taps((0, 1), normed_last_layer=True)
    outputs = tm.feed(runner, prompt, pages, chunks=(9, 7, 1))
    runner.forward(tm.tree_step([(tree, (-1, 0, 0, 2, 2, 4), 21, pages)]))
    runner.commit(Commit(torch.tensor([0, 2, 4, 5]), tm.slots(pages, [21, 22, 23, 24])))
    outputs.append(runner.forward(tm.chain_step([TOKENS[37]], 25, pages)))
    text = [*prompt, tree[0], tree[2], tree[4], tree[5], TOKENS[37]]
    with torch.inference_mode():
        expected = family[1](torch.tensor([text]), output_hidden_states=True)
    rows = [*range(21), 25]
    got = torch.cat([o.logits for o in outputs])
    torch.testing.assert_close(got, expected.logits[0, rows].float(), atol=2e-5, rtol=2e-5)
    taps = torch.cat([o.taps for o in outputs if o.taps is not None])
    states = torch.cat([state[0, rows] for state in expected.hidden_states[1:]], -1)
    torch.testing.assert_close(taps, states, atol=2e-5, rtol=2e-5)
