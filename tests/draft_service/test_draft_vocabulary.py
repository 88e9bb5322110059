"""A reduced head: the same proposals as the whole one's, were the other tokens impossible."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tiny import VOCAB_SIZE, make_drafter, make_target

from draft_service.block_attention import BlockBatch
from draft_service.config import DraftSettings
from draft_service.draft_vocabulary import FILE, cut_to, read_vocabulary, write_vocabulary
from draft_service.drafter import Drafter
from draft_service.drafter_config import DrafterConfig, TargetFacts
from draft_service.drafter_files import Places, open_files
from draft_service.drafter_layouts import parse_config
from draft_service.drafter_weights import DrafterWeights
from draft_service.host_trees import Ask, HostTrees
from draft_service.session import Session
from draft_service.tree import build_trees_from_logits
from kernels.philox import gumbel_noise
from specbridge.errors import ConfigError
from specbridge.paging import PagePool
from specbridge.rounds import SamplingParams, SessionKey

KEPT = 70
CONTEXT = 21


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    root = tmp_path_factory.mktemp("vocabulary")
    return Places(make_drafter(root / "draft", scale=0.2), make_target(root / "target"))


@pytest.fixture(scope="module")
def ranked() -> list[int]:
    return torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(3))[:KEPT].tolist()


def load(places: Places, vocabulary: int) -> tuple[Drafter, DrafterWeights, DrafterConfig]:
    settings = DraftSettings(device="cpu", draft_vocabulary=vocabulary)
    files = open_files(settings, places)
    config = parse_config(files.draft_config, TargetFacts.read(files.target_config))
    weights = files.weights(config, dtype=torch.float64, device="cpu")
    files.close()
    return Drafter(config, weights, dtype=torch.float64, max_position=128), weights, config


def session(drafter: Drafter, sampling: SamplingParams) -> tuple[Session, object]:
    pool = PagePool(4, 16)
    sequence = pool.open(())
    sequence.reserve(CONTEXT)
    sequence.extend(list(range(CONTEXT)))
    return Session(SessionKey(bytes(16), 0), sampling, b"", sequence), pool


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.8, seed=2**63 + 5)])
@pytest.mark.parametrize("size", [-1, 40])
def test_trees_are_those_of_the_whole_head_without_the_other_tokens(
    places: Places, ranked: Sequence[int], sampling: SamplingParams, size: int
) -> None:
    write_vocabulary(places.draft, ranked, {})
    whole, _, config = load(places, 0)
    reduced, _, _ = load(places, size)
    pages = whole.new_pages(4, 16)
    rows = torch.randn(CONTEXT, config.feature_size, generator=torch.Generator().manual_seed(1)).double()
    whole.append(pages, rows, torch.arange(CONTEXT), torch.arange(CONTEXT))
    own, _pool = session(reduced, sampling)
    ask = Ask(own, 7, 50, config.horizon)
    tree = HostTrees(reduced, pages, top_k=None, simulation=None).grow([ask]).trees[0]

    batch = BlockBatch([7], [CONTEXT], [own.sequence.pages])
    logits = whole.propose(pages, batch).clone()
    others = torch.ones(VOCAB_SIZE, dtype=torch.bool)
    others[list(ranked if size < 0 else ranked[:size])] = False
    logits[..., others] = -torch.inf
    # The pass of a GPU has the whole width.
    assert torch.equal(reduced.propose(pages, batch).isinf(), logits.isinf())
    torch.testing.assert_close(reduced.propose(pages, batch), logits)
    noise = None
    if not sampling.greedy:
        depths = list(range(CONTEXT + 1, CONTEXT + 1 + config.horizon))
        many = len(depths)
        noise = [gumbel_noise([sampling.seed] * many, depths, [0] * many, VOCAB_SIZE)]
    [wanted] = build_trees_from_logits(
        logits, [50], max_depths=[config.horizon], temperatures=[sampling.temperature], noise=noise
    )
    assert (tree.tokens, tree.parents) == (wanted.tokens, wanted.parents)
    torch.testing.assert_close(torch.tensor(tree.scores), torch.tensor(wanted.scores))


def test_a_head_of_its_own_is_cut_too_and_kept_in_order(places: Places, ranked: Sequence[int]) -> None:
    write_vocabulary(places.draft, ranked, {})
    _, weights, _ = load(places, 0)
    assert weights.target_ids is None
    turned = torch.arange(VOCAB_SIZE).flip(0)[:200]  # a published d2t need not ascend
    own = cut_to(weights, turned)
    kept = read_vocabulary(places.draft, vocab_size=VOCAB_SIZE)
    assert kept is not None and kept.tolist() == sorted(ranked)
    both = cut_to(own, kept)
    assert both.target_ids is not None
    assert set(both.target_ids.tolist()) == set(ranked) & set(turned.tolist())
    assert torch.equal(both.head, weights.head[both.target_ids])
    with pytest.raises(ConfigError, match="names none of the tokens"):
        cut_to(own, torch.tensor([0, 1]))


def test_files_that_do_not_fit_are_refused(places: Places, tmp_path: Path) -> None:
    def read(size: int = -1) -> torch.Tensor | None:
        return read_vocabulary(tmp_path, vocab_size=100, size=size)

    assert read() is None and read(0) is None
    with pytest.raises(ConfigError, match="train head"):
        read(8)
    for ids, message in (
        ([5, 5, 1], "each once"),
        ([5, 100], "outside the target's vocabulary of 100"),
        ([], "each once"),
    ):
        write_vocabulary(tmp_path, ids, {})
        with pytest.raises(ConfigError, match=message):
            read()
    write_vocabulary(tmp_path, [9, 3, 7], {"coverage": "1"})
    with pytest.raises(ConfigError, match="more than the 3 ids"):
        read(4)
    found = read(2)
    assert found is not None and found.tolist() == [3, 9]
    (tmp_path / FILE).write_bytes(b"{}")
    with pytest.raises(ConfigError, match="can't be read"):
        read()


def test_the_published_reference_reads_the_folder_as_before(places: Places, ranked: Sequence[int]) -> None:
    """What loads `model.safetensors` only does not see the file; what loads all of them meets a name more."""
    from safetensors.torch import load_file

    before = set(load_file(places.draft / "model.safetensors"))
    write_vocabulary(places.draft, ranked, {})
    assert set(load_file(places.draft / "model.safetensors")) == before
    assert json.loads((places.draft / "config.json").read_text()).get("draft_vocab_size") is None
