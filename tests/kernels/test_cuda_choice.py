"""choose_rows, merge_choices and the noise in kernels: against the host's commit rule and torch."""

from __future__ import annotations

import math

import pytest
import torch

from kernels import choice, cuda
from kernels.choice import (
    NO_CHOICE,
    Choices,
    choose_rows,
    choose_rows_reference,
    merge_choices,
    merge_choices_reference,
)
from kernels.philox import gumbel_noise, philox4x32_10
from specbridge import rounds
from specbridge.rounds import SamplingParams
from target_service import sampling
from target_service.sampling import ChoiceRule, RowGroup, choose

SEEDS = [0, -5, 2**62 + 12345, 42, 7]
HEATS = [0.0, 1.0, 0.7, 1e-6, 2.0]
Arguments = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def arguments(device: torch.device | str, rows: int) -> Arguments:
    """temperature, seeds, positions, choices of `rows` mixed rows."""

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return (
        torch.tensor([HEATS[r % 5] for r in range(rows)], device=device),
        torch.tensor([SEEDS[r % 5] for r in range(rows)], device=device),
        ints([3 + 1000 * r for r in range(rows)]),
        ints([r % 3 for r in range(rows)]),
    )


def logits_of(rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Rounded to few values, so that the best ones tie."""
    generator = torch.Generator().manual_seed(rows * vocab)
    return torch.randn(rows, vocab, generator=generator).mul(4).round().div(2).to(device, dtype)


def assert_same(got: Choices, want: Choices, scores: torch.Tensor, first_token: int) -> None:
    """Equal, or, where noise rounds differently, a choice whose score is the best but for that."""
    torch.testing.assert_close(got.best, want.best, rtol=0, atol=2e-6)
    picked = scores.gather(1, (got.ids - first_token).long().unsqueeze(1)).squeeze(1)
    assert torch.all((got.ids == want.ids) | (want.best - picked <= 4e-6))


@pytest.mark.parametrize("first", [0, 3, 18993])
def test_noise_words_are_the_same_bits(triton_device: torch.device, first: int) -> None:
    from kernels.cuda.noise import gumbel_noise as triton_noise

    _, seeds, positions, choices = arguments(triton_device, 5)
    words = torch.empty(5, 1501, dtype=torch.int32, device=triton_device)
    noise = triton_noise(seeds, positions, choices, 1501, first_token=first, words_out=words).cpu()
    ids = torch.arange(first, first + 1501)
    seeds, rows, picks = (x.cpu().long().unsqueeze(1) for x in (seeds, positions, choices))
    low = 0xFFFFFFFF
    block = (ids // 4).unsqueeze(0)
    want = philox4x32_10((block, rows, picks, torch.zeros_like(block)), (seeds & low, (seeds >> 32) & low))
    want = want.gather(2, (ids % 4).view(1, -1, 1).expand(5, -1, -1)).squeeze(2)
    assert torch.equal(words.cpu().long() & low, want)
    # Units in the last place of max(|g|, 1), against the formula in fp64 on the words' fp32 values. numpy's
    # logarithm, which the interpreter uses, is itself good to 4 units only.
    w = ((want.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24).double()
    exact = -torch.log(-torch.log1p(-w))
    ulp = torch.exp2(torch.floor(torch.log2(exact.abs().clamp(min=1.0))) - 23)
    assert float(((noise - exact).abs() / ulp).max()) <= (8.0 if cuda.interpreting() else 2.0)


def test_noise_is_torchs(triton_device: torch.device) -> None:
    """Of 2^20 draws some come near both ends; the ends themselves are kernels.philox's tests' matter."""
    from kernels.cuda.noise import gumbel_noise as triton_noise

    _, seeds, positions, choices = arguments(triton_device, 2)
    count = 1 << (12 if cuda.interpreting() else 19)
    noise = triton_noise(seeds, positions, choices, count)
    want = gumbel_noise(seeds, positions, choices, count, device=triton_device)
    assert noise.isfinite().all() and noise.min() >= -2.83 and noise.max() <= 22.9
    torch.testing.assert_close(noise, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab", "first"), [(5, 0), (2048, 4), (5003, 7), (8001, 0)])
def test_choice_is_the_references(
    triton_device: torch.device, vocab: int, first: int, dtype: torch.dtype
) -> None:
    logits, args = logits_of(5, vocab, dtype, triton_device), arguments(triton_device, 5)
    got = choose_rows(logits, *args, first_token=first)
    want = choose_rows_reference(logits, *args, first_token=first)
    assert got.ids.dtype == torch.int32 and got.best.dtype == torch.float32
    scores = with_noise(logits, args, first)
    assert_same(got, want, scores, first)
    greedy = args[0] < 1e-5
    assert torch.equal(got.ids[greedy], want.ids[greedy]) and torch.equal(got.best[greedy], want.best[greedy])


def with_noise(logits: torch.Tensor, args: Arguments, first: int = 0) -> torch.Tensor:
    heat = args[0].unsqueeze(1)
    noise = gumbel_noise(*args[1:], logits.shape[1], first_token=first, device=logits.device)
    return torch.where(heat < 1e-5, logits.float(), logits.float() / heat.clamp(min=1e-5) + noise)


def test_rows_need_not_lie_side_by_side(triton_device: torch.device) -> None:
    """A head padded to a round width: the columns past the vocabulary are not read."""
    wide = torch.full((5, 1024), 99.0, device=triton_device)
    wide[:, :1000] = logits_of(5, 1000, torch.float32, triton_device)
    args = arguments(triton_device, 5)
    want = choose_rows_reference(wide[:, :1000].contiguous(), *args)
    assert_same(choose_rows(wide[:, :1000], *args), want, with_noise(wide[:, :1000], args), 0)


@pytest.mark.parametrize("cuts", [[0, 1003], [0, 250, 500, 752, 1003], [0, 1, 2, 1002, 1003]])
def test_shares_of_the_vocabulary_merge_to_the_whole(triton_device: torch.device, cuts: list[int]) -> None:
    logits, args = logits_of(5, 1003, torch.float32, triton_device), arguments(triton_device, 5)
    whole = choose_rows(logits, *args)
    parts = [choose_rows(logits[:, a:b], *args, first_token=a) for a, b in zip(cuts, cuts[1:], strict=False)]
    merged = merge_choices(torch.stack([p.best for p in parts]), torch.stack([p.ids for p in parts]))
    assert torch.equal(merged.ids, whole.ids) and torch.equal(merged.best, whole.best)


NAN, INF = math.nan, math.inf
ODD_ROWS = [
    ([1.0, NAN, 3.0, 2.0], NO_CHOICE),
    ([NAN, NAN, NAN, NAN], NO_CHOICE),
    ([1.0, INF, 3.0, 2.0], NO_CHOICE),
    ([-INF, -INF, -INF, -INF], NO_CHOICE),
    ([-INF, -2.0, -INF, -2.0], 1),
    ([5.0, 5.0, 5.0, 5.0], 0),
    ([-0.0, 0.0, 0.0, -0.0], 0),
]


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_rows_that_are_no_numbers(triton_device: torch.device, heat: float) -> None:
    rows = len(ODD_ROWS)
    logits = torch.tensor([row for row, _ in ODD_ROWS], device=triton_device)
    args = (torch.full((rows,), heat, device=triton_device), *arguments(triton_device, rows)[1:])
    for got in (choose_rows(logits, *args), choose_rows_reference(logits, *args)):
        if heat:
            assert [i == NO_CHOICE for i in got.ids.tolist()] == [i == NO_CHOICE for _, i in ODD_ROWS]
        else:
            assert got.ids.tolist() == [i for _, i in ODD_ROWS]
        assert torch.equal(got.best.isfinite(), got.ids != NO_CHOICE)


def test_merge_takes_the_lowest_id_and_passes_nan_on(triton_device: torch.device) -> None:
    best = torch.tensor([[1.0, 2.0, NAN, -INF, INF], [1.0, 3.0, 9.0, -INF, 1.0], [0.5, 3.0, 9.0, 4.0, 2.0]])
    ids = torch.tensor([[7, 9, -1, -1, -1], [3, 30, 4, -1, 5], [1, 20, 5, 8, 6]], dtype=torch.int32)
    want = [3, 20, NO_CHOICE, 8, NO_CHOICE]
    for merge in (merge_choices, merge_choices_reference):
        assert merge(best.to(triton_device), ids.to(triton_device)).ids.tolist() == want


@pytest.mark.parametrize("heat", [0.0, 0.8, 1.0])
def test_reference_is_the_hosts_commit_rule(heat: float) -> None:
    logits = logits_of(6, 4099, torch.float32, torch.device("cpu"))
    logits[2, 17] = NAN
    logits[4, 5] = INF
    params = SamplingParams(temperature=heat, seed=-9, choice=2)
    want = choose(logits, [RowGroup(ChoiceRule(params), 0, range(50, 56))])
    got = choose_rows_reference(
        logits,
        torch.full((6,), heat),
        torch.full((6,), -9),
        torch.arange(50, 56, dtype=torch.int32),
        torch.full((6,), 2, dtype=torch.int32),
    )
    assert got.ids.tolist() == want.tolist()


def test_both_sides_agree_on_what_is_greedy_and_on_no_choice() -> None:
    """kernels imports neither package, so it has constants of its own."""
    assert (choice.GREEDY_BELOW, choice.NO_CHOICE) == (rounds.GREEDY_BELOW, sampling.NO_CHOICE)


def test_float64_stays_float64() -> None:
    logits = torch.tensor([[1.0, 1.0 + 2.0**-40, 1.0]], dtype=torch.float64)
    assert choose_rows(logits, *(x[:1] for x in arguments("cpu", 1))).ids.tolist() == [1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [49152, 151936])
@pytest.mark.parametrize("rows", [1, 17, 200, 512])
def test_real_vocabularies(rows: int, vocab: int, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    generator = torch.Generator(device=device).manual_seed(rows)
    logits = torch.randn(rows, vocab, generator=generator, device=device).mul(3).to(dtype)
    args = arguments(device, rows)
    got, want = choose_rows(logits, *args), choose_rows_reference(logits, *args)
    assert_same(got, want, with_noise(logits, args), 0)
    greedy = args[0] < 1e-5
    assert torch.equal(got.ids[greedy], want.ids[greedy])
    parts = [
        choose_rows(logits[:, a : a + vocab // 4], *args, first_token=a) for a in range(0, vocab, vocab // 4)
    ]
    merged = merge_choices(torch.stack([p.best for p in parts]), torch.stack([p.ids for p in parts]))
    assert torch.equal(merged.ids, got.ids) and torch.equal(merged.best, got.best)


@pytest.mark.gpu
def test_captured_in_a_graph() -> None:
    device = torch.device("cuda")
    logits, args = logits_of(17, 49152, torch.bfloat16, device), arguments(device, 17)
    choose_rows(logits, *args)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = choose_rows(logits, *args)
    for seed in range(3):
        logits.copy_(torch.randn(17, 49152, generator=torch.Generator().manual_seed(seed)))
        args[2].add_(1)
        graph.replay()
        again = choose_rows(logits, *args)
        assert torch.equal(out.ids, again.ids) and torch.equal(out.best, again.best)
