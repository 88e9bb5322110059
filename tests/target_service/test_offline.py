"""The offline generator against plain decoding in transformers and against the served engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from plain_decoding import PlainDecoding
from tiny import EOS_ID, make_target

from specbridge.errors import ConfigError
from specbridge.rounds import SamplingParams
from target_service.model.config import ModelConfig
from target_service.offline import Generator, OfflineRequest, load_generator
from target_service.offline_device import DeviceSlots
from target_service.offline_passes import chunks

LENGTH = 64
TAPS = (0, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"), dtype=torch.float32)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> PlainDecoding:
    return PlainDecoding(folder, torch.float32)


def device_generator(folder: Path, device: str, slots: int, **more: object) -> Generator:
    """The GPU's way; on a CPU its kernels' torch references."""
    config = ModelConfig.from_folder(folder)
    passes = DeviceSlots(
        folder, config, device=torch.device(device), dtype=torch.float32, slots=slots, length=LENGTH, span=4
    )
    return Generator(passes, length=LENGTH, eos=config.eos_token_ids)


def generator(kind: str, folder: Path, slots: int) -> Generator:
    if kind == "host":
        return load_generator(str(folder), device="cpu", dtype="float32", length=LENGTH, slots=slots)
    return device_generator(folder, kind, slots)


KINDS = ["host", "cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


def requests() -> list[OfflineRequest]:
    """More than slots, of mixed lengths and temperatures; limits that end in the middle of a span."""
    made = []
    for key in range(7):
        prompt = torch.randint(0, 256, (3 + 5 * key,), generator=torch.Generator().manual_seed(key)).tolist()
        temperature = (0.0, 1.0, 0.7)[key % 3]
        made.append(OfflineRequest(key, prompt, temperature, 2**64 - 1 - key, (9, 1, 14, 5)[key % 4]))
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_those_of_plain_decoding(folder: Path, oracle: PlainDecoding, kind: str) -> None:
    asked = requests()
    texts = {text.key: text for text in generator(kind, folder, 3).generate(iter(asked))}
    assert sorted(texts) == list(range(7))
    for request in asked:
        sampling = SamplingParams(temperature=request.temperature)
        wanted = oracle.text(request.tokens, sampling, seed=request.seed, count=request.max_tokens)
        if EOS_ID in wanted:
            wanted = wanted[: wanted.index(EOS_ID) + 1]
        assert texts[request.key].tokens == wanted, request
        assert texts[request.key].ended == (EOS_ID in wanted)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_text_ends_at_an_end_of_text_id_wherever_it_comes(folder: Path, kind: str) -> None:
    """The ids of one text, one after the other, as the id that ends it."""
    [request] = [OfflineRequest(0, [5, 6, 7, 8], 1.0, 3, 12)]
    plain = generator(kind, folder, 2)
    [whole] = plain.generate([request])
    assert not whole.ended and len(whole.tokens) == 12
    for token in dict.fromkeys(whole.tokens):
        cut = Generator(plain._passes, length=LENGTH, eos=[token])
        [text] = cut.generate([request])
        assert text.ended and text.tokens == whole.tokens[: whole.tokens.index(token) + 1]


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_are_those_of_transformers(folder: Path, oracle: PlainDecoding, kind: str) -> None:
    texts = [[1, 2, 3], list(range(40)), [7] * 11]
    taps = generator(kind, folder, 1).taps(texts, TAPS, normed_last_layer=False)
    for text, rows in zip(texts, taps, strict=True):
        states = oracle.model(torch.tensor([text]), output_hidden_states=True).hidden_states
        wanted = torch.cat([states[layer + 1][0] for layer in TAPS], dim=-1)
        # Of each row as a whole: single elements cancel, and what remains is rounding of the others.
        off = (rows.cpu().float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        assert off.max() < 2e-5, off


def test_prompts_are_cut_into_passes() -> None:
    assert list(chunks([3, 4, 5, 20, 1], 8)) == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5)]
    assert [part.stop - part.start for part in chunks([1] * 130, 1000)] == [63, 63, 4]


def test_what_does_not_fit_is_refused(folder: Path) -> None:
    small = generator("host", folder, 1)
    with pytest.raises(ConfigError, match="has 60 tokens and asks for 5"):
        list(small.generate([OfflineRequest(0, [1] * 60, 0.0, 0, 5)]))
    with pytest.raises(ConfigError, match="longer than the model's 1024"):
        load_generator(str(folder), device="cpu", length=2000)
