"""top_candidates against a stable sort of the very same log-probabilities, ties and odd rows included."""

from __future__ import annotations

import math

import pytest
import torch

from draft_service.tree import noisy_log_probs
from kernels import cuda
from kernels.marginals import Candidates, top_candidates, top_candidates_reference
from kernels.philox import gumbel_noise

Arguments = tuple[torch.Tensor, ...]
HEATS = [0.0, 1.0, 0.7]


def arguments(device: torch.device | str, sessions: int, limits: list[int]) -> Arguments:
    """temperature, seeds, choices, bases, depth_limits of `sessions` mixed sessions."""

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    count = range(sessions)
    return (
        torch.tensor([HEATS[s % 3] for s in count], device=device),
        torch.tensor([-5 + 7**s % 2**61 for s in count], device=device),
        ints([s % 2 for s in count]),
        ints([10 + 100 * s for s in count]),
        ints([limits[s % len(limits)] for s in count]),
    )


def scores_of(logits: torch.Tensor, args: Arguments) -> torch.Tensor:
    """fp32 [sessions, depths, vocab] before the softmax, with the noise that the device under test makes."""
    sessions, depths, vocab = logits.shape
    heat, seeds, choices, bases, _ = args
    positions = (bases.unsqueeze(1) + torch.arange(1, depths + 1, device=logits.device)).to(torch.int32)
    rows = (seeds.repeat_interleave(depths), positions.flatten(), choices.repeat_interleave(depths))
    if cuda.takes(logits):
        from kernels.cuda.noise import gumbel_noise as triton_noise

        noise = triton_noise(*rows, vocab)
    else:
        noise = gumbel_noise(*rows, vocab)
    heat = heat.view(-1, 1, 1)
    noisy = logits.float() / heat.clamp(min=1e-5) + noise.view_as(logits)
    return torch.where(heat < 1e-5, logits.float(), noisy)


def assert_exact(got: Candidates, logits: torch.Tensor, args: Arguments, width: int) -> None:
    """Every log-probability, id and place; only the softmax's denominator is taken from the op itself (the
    best token's log-probability is its negative), and compared with a tolerance.
    """
    scores = scores_of(logits, args)
    limits = args[4].tolist()
    top = scores.amax(dim=-1, keepdim=True)
    log_sum = -got.log_probs[..., :1]
    want = torch.sort((scores - top) - log_sum, dim=-1, descending=True, stable=True)
    exact_sum = (scores - top).double().exp().sum(-1).log()
    for s, limit in enumerate(limits):
        assert torch.equal(got.ids[s, :limit], want.indices[s, :limit, :width].to(torch.int32))
        assert torch.equal(got.log_probs[s, :limit], want.values[s, :limit, :width])
        torch.testing.assert_close(log_sum[s, :limit, 0].double(), exact_sum[s, :limit], rtol=2e-6, atol=2e-6)
        assert (got.log_probs[s, limit:] == -math.inf).all() and (got.ids[s, limit:] == 0).all()


def logits_of(kind: str, shape: tuple[int, ...], device: torch.device | str) -> torch.Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).mul(3).to(device)
    return {"fp32": drawn, "bf16": drawn.bfloat16(), "ties": drawn.round(), "one value": drawn * 0 + 1.5}[
        kind
    ]


@pytest.mark.parametrize("kind", ["fp32", "bf16", "ties", "one value"])
@pytest.mark.parametrize(("vocab", "width"), [(3, 2), (100, 40), (1003, 16), (4500, 1)])
def test_order_is_exact(triton_device: torch.device, kind: str, vocab: int, width: int) -> None:
    logits = logits_of(kind, (2, 2, vocab), triton_device)
    args = arguments(triton_device, 2, [2, 1])
    got = top_candidates(logits, *args, width=width)
    assert got.ids.dtype == torch.int32 and got.log_probs.shape == (2, 2, width)
    assert_exact(got, logits, args, width)


def test_tokens_of_no_probability_and_no_numbers(triton_device: torch.device) -> None:
    logits = torch.full((1, 4, 70), -math.inf, device=triton_device)
    logits[0, 0, [5, 60]] = torch.tensor([1.0, 2.0], device=triton_device)
    logits[0, 1] = 0.0
    logits[0, 1, 33] = math.nan
    logits[0, 2, 3] = math.inf
    for op in (top_candidates, top_candidates_reference):
        got = op(logits, *arguments(triton_device, 1, [4]), width=4)
        assert got.ids[0, 0].tolist() == [60, 5, 0, 1]
        assert got.log_probs[0, 0].isfinite().tolist() == [True, True, False, False]
        assert not (got.log_probs[0, 1:] > -math.inf).any()


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_reference_is_the_hosts_scores(kind: str) -> None:
    logits = logits_of(kind, (3, 2, 2000), "cpu")
    args = arguments("cpu", 3, [2])
    got = top_candidates_reference(logits, *args, width=20)
    for s in range(3):
        position = int(args[3][s])
        rows = ([int(args[1][s])] * 2, [position + 1, position + 2], [int(args[2][s])] * 2)
        scores = noisy_log_probs(logits[s], float(args[0][s]), gumbel_noise(*rows, 2000))
        want = torch.sort(scores, dim=-1, descending=True, stable=True)
        torch.testing.assert_close(got.log_probs[s], want.values[:, :20], rtol=1e-6, atol=2e-6)
        if float(args[0][s]) in (0.0, 1.0):  # elsewhere the host multiplies by 1 / T, and may round otherwise
            assert torch.equal(got.ids[s].long(), want.indices[:, :20])


def test_float64_goes_to_the_reference() -> None:
    logits = torch.zeros(1, 1, 9, dtype=torch.float64)
    logits[0, 0, 4] = 1e-3
    got = top_candidates(logits, *arguments("cpu", 1, [1]), width=3)
    assert got.ids.tolist() == [[[4, 0, 1]]]


@pytest.mark.parametrize("width", [0, 31, 257])
def test_widths_that_cannot_be(width: int) -> None:
    with pytest.raises(ValueError, match="candidates of"):
        top_candidates(torch.zeros(1, 1, 30), *arguments("cpu", 1, [1]), width=width)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fp32", "bf16", "ties"])
@pytest.mark.parametrize("vocab", [49152, 151936])
@pytest.mark.parametrize(("sessions", "width"), [(1, 64), (3, 16), (3, 100), (3, 256), (32, 64)])
def test_real_vocabularies(sessions: int, width: int, vocab: int, kind: str) -> None:
    device = torch.device("cuda")
    logits = logits_of(kind, (sessions, 15, vocab), device)
    args = arguments(device, sessions, [15, 7, 0])
    assert_exact(top_candidates(logits, *args, width=width), logits, args, width)
