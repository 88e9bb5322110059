"""Text side of the gateway: tokenizer and chat template against transformers, decoding, stop strings."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from surface import CHAT_TEMPLATE, EOS_TEXT, byte_backend, byte_tokenizer, fallback_backend, ids_of

from gateway.detokenize import StreamDecoder, TextStream
from gateway.text import SamplingDefaults, Tokenizer, compile_template
from specbridge.errors import ConfigError, InvalidRequest

TOY = byte_tokenizer(["…br", "own", " fox", "STOP", "ab"])
FALLBACK = fallback_backend()
SPLITS_OF = "hi😀日本 é!"


def blocks_of(ids: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    edges = [0, *sorted(cuts), len(ids)]
    return [list(ids[a:b]) for a, b in itertools.pairwise(edges)]


def run(stream: TextStream, blocks: Sequence[Sequence[int]]) -> tuple[str, list[int], list[str]]:
    """Text, ids and the deltas' texts of one request."""
    deltas = [stream.push(block) for block in blocks]
    deltas.append(stream.finish())
    texts = [d.text for d in deltas]
    return "".join(texts), [i for d in deltas for i in d.token_ids], texts


# ---- decoding -------------------------------------------------------------------------------


@settings(max_examples=200)
@given(st.lists(st.integers(0, TOY.vocab_size + 3), max_size=24), st.booleans(), st.data())
def test_deltas_add_up_to_one_shot_decoding(ids: list[int], skip: bool, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=6))
    text, kept, _ = run(TextStream(TOY.decoder(skip_special_tokens=skip)), blocks_of(ids, cuts))
    assert text == TOY.decode(ids, skip_special_tokens=skip)
    assert kept == ids


@settings(max_examples=100)
@given(st.text(max_size=12), st.data())
@example("a日\U0001f600b", None)
def test_byte_fallback_decoding_equals_one_shot(text: str, data: st.DataObject | None) -> None:
    ids = FALLBACK.encode(text).ids
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=4)) if data is not None else [2]
    decoder = StreamDecoder(FALLBACK, skip_special_tokens=True)
    assert run(TextStream(decoder), blocks_of(ids, cuts))[0] == FALLBACK.decode(ids)


def test_byte_fallback_keeps_what_was_delivered_when_later_bytes_break() -> None:
    # One-shot decoding turns the whole run of byte tokens into U+FFFD, the complete é too.
    ids = [FALLBACK.token_to_id(t) for t in ("<0xC3>", "<0xA9>", "<0xF0>", "▁the", "a")]
    assert run(TextStream(StreamDecoder(FALLBACK, skip_special_tokens=True)), [ids])[0] == "é� thea"


def test_both_decoders_agree_on_a_byte_level_vocabulary() -> None:
    backend = byte_backend()
    ids = backend.encode(SPLITS_OF * 3).ids
    for cut in range(len(ids)):
        slow = StreamDecoder(backend, skip_special_tokens=True)
        assert run(TextStream(slow), [ids[:cut], ids[cut:]])[0] == SPLITS_OF * 3


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_characters_split_over_tokens_and_blocks_come_whole(size: int) -> None:
    ids = TOY.encode(SPLITS_OF)
    assert len(ids) == len(SPLITS_OF.encode())
    blocks = [ids[i : i + size] for i in range(0, len(ids), size)]
    text, _, deltas = run(TextStream(TOY.decoder()), blocks)
    assert text == SPLITS_OF
    assert "\ufffd" not in "".join(deltas)


def test_truncated_character_is_flushed_at_the_end_with_its_ids() -> None:
    ids = TOY.encode("x😀")[:-1]
    stream = TextStream(TOY.decoder())
    first = stream.push(ids)
    assert (first.text, first.token_ids) == ("x", tuple(ids[:1]))
    last = stream.finish()
    assert (last.text, last.token_ids) == ("\ufffd", tuple(ids[1:]))


def test_special_tokens_are_hidden_unless_asked_for() -> None:
    ids = [*TOY.encode("a"), *ids_of(TOY, EOS_TEXT), *TOY.encode("b")]
    assert run(TOY.stream(), [ids])[0] == "ab"
    assert run(TOY.stream(skip_special_tokens=False), [ids])[0] == f"a{EOS_TEXT}b"


def test_the_text_of_the_id_that_ended_the_text_is_hidden_but_the_id_kept() -> None:
    ids = TOY.encode("ab")
    delta = TOY.stream().push(ids, last_stops=True)
    assert (delta.text, delta.token_ids) == ("a", tuple(ids))
    assert TOY.stream(include_stop=True).push(ids, last_stops=True).text == "ab"


# ---- stop strings ---------------------------------------------------------------------------


def oracle(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """Read character by character: the first stop string to be complete ends the text."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            stop = max(found, key=len)
            return text[:end] if include else text[: end - len(stop)], stop
    return text, None


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from(["a", "b", "ab", "own", "…br", " fox", "😀"]), max_size=10),
    st.lists(st.text("abow😀", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
    st.data(),
)
def test_stop_strings_for_every_split(
    pieces: list[str], stops: list[str], include: bool, data: st.DataObject
) -> None:
    ids: list[int] = []
    for piece in pieces:
        ids.extend(ids_of(TOY, piece) if piece != "😀" and len(piece) > 1 else TOY.encode(piece))
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=6))
    stream = TOY.stream(stops, include_stop=include)
    text, kept, deltas = run(stream, blocks_of(ids, cuts))
    expected, stop = oracle("".join(pieces), stops, include)
    assert (text, stream.matched) == (expected, stop)
    # Ids go with the text: a prefix of them, the shortest whose text holds all that was kept.
    assert kept == ids[: len(kept)]
    assert len(kept) == stream.num_tokens
    if stop is None:
        assert kept == ids
    else:
        assert TOY.decode(kept).startswith(expected)
        assert not kept or len(TOY.decode(kept[:-1]).rstrip("\ufffd")) < len(expected)
    # Nothing that a later token could take back was delivered.
    for count in range(len(deltas)):
        assert expected.startswith("".join(deltas[:count]))


def test_stop_string_in_the_second_token_of_a_block_drops_the_rest() -> None:
    ids = [*TOY.encode("x"), *ids_of(TOY, "STOP"), *TOY.encode("abcdef")]
    stream = TOY.stream(["STOP"])
    delta = stream.push(ids)
    assert (delta.text, delta.token_ids, delta.stop) == ("x", tuple(ids[:1]), "STOP")
    assert stream.push(ids).text == "" and stream.finish().text == ""


def test_stop_string_over_three_tokens_and_blocks() -> None:
    ids = ids_of(TOY, "…br", "own", " fox")
    stream = TOY.stream(["own fox"])
    assert stream.push(ids[:1]).text == "…br"
    held = stream.push(ids[1:2])
    assert (held.text, held.token_ids) == ("", ())
    assert stream.push(ids[2:]).stop == "own fox"
    assert stream.num_tokens == 1


def test_held_back_text_comes_when_the_match_fails() -> None:
    ids = ids_of(TOY, "…br", "own", "ab")
    stream = TOY.stream(["own fox"])
    assert [stream.push([i]).text for i in ids] == ["…br", "", "ownab"]


def test_stop_inside_a_token_keeps_the_token_and_cuts_its_text() -> None:
    [own] = ids_of(TOY, "own")
    delta = TOY.stream(["wn"]).push([own])
    assert (delta.text, delta.token_ids) == ("o", (own,))


def test_stop_string_counts_only_behind_min_tokens() -> None:
    ids = TOY.encode("abab")
    stream = TOY.stream(["ab"], min_tokens=2)
    assert run(stream, [ids])[0] == "ab" and stream.matched == "ab"
    assert run(TOY.stream(["ab"], min_tokens=4), [ids])[0] == "abab"


# ---- files ----------------------------------------------------------------------------------


def write_folder(folder: Path, **files: Any) -> Path:
    byte_backend().save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        path = folder / name.replace("__", ".")
        path.write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


def test_eos_defaults_and_template_come_from_the_folder(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path,
        tokenizer_config__json={"eos_token": {"content": EOS_TEXT}, "chat_template": "{{ eos_token }}"},
        generation_config__json={"eos_token_id": [7, 9, 7], "temperature": 0.6, "top_k": 20, "top_p": 0.95},
        config__json={"eos_token_id": 3},
    )
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.eos_token_ids == (7, 9)
    assert tokenizer.defaults == SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, min_p=0.0)
    assert tokenizer.render_chat([]) == EOS_TEXT
    (folder / "generation_config.json").unlink()
    (folder / "chat_template.jinja").write_text("file wins")
    assert Tokenizer.load(folder).eos_token_ids == (3,)
    assert Tokenizer.load(folder).defaults == SamplingDefaults(temperature=1.0)
    assert Tokenizer.load(folder).render_chat([]) == "file wins"
    (folder / "config.json").unlink()
    assert Tokenizer.load(folder).eos_token_ids == ids_of(TOY, EOS_TEXT)[:0] + (
        Tokenizer.load(folder)._backend.token_to_id(EOS_TEXT),
    )


def test_named_templates_pick_the_default(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    folder = write_folder(tmp_path, tokenizer_config__json={"chat_template": named})
    assert Tokenizer.load(folder).render_chat([]) == "D"


def test_missing_or_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    write_folder(tmp_path, tokenizer_config__json="{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is not JSON"):
        Tokenizer.load(tmp_path)


def test_tokens_listed_only_in_tokenizer_config_are_added(tmp_path: Path) -> None:
    size = byte_backend().get_vocab_size()
    added = {str(size): {"content": "<think>", "special": False}}
    folder = write_folder(tmp_path, tokenizer_config__json={"added_tokens_decoder": added})
    assert Tokenizer.load(folder).encode("<think>") == [size]
    added = {str(size + 5): {"content": "<think>", "special": False}}
    write_folder(tmp_path, tokenizer_config__json={"added_tokens_decoder": added})
    with pytest.raises(ConfigError, match="do not belong together"):
        Tokenizer.load(folder)


def test_templates_that_refuse_or_reach_out_are_errors_of_the_request() -> None:
    backend = byte_backend()
    refusing = Tokenizer(backend, chat_template="{{ raise_exception('only two roles') }}")
    with pytest.raises(InvalidRequest, match="only two roles") as caught:
        refusing.render_chat([])
    assert caught.value.param == "messages"
    escaping = Tokenizer(backend, chat_template="{{ messages.__class__.__mro__ }}")
    with pytest.raises(InvalidRequest, match="unsafe"):
        escaping.render_chat([])
    with pytest.raises(InvalidRequest, match="no chat template"):
        Tokenizer(backend).render_chat([])
    with pytest.raises(ConfigError, match="does not compile"):
        compile_template("{% if %}")


def test_template_helpers_equal_transformers() -> None:
    source = (
        "{%- for m in messages %}\n    {%- if loop.index0 > 1 %}{% break %}{% endif %}\n"
        "    {% generation %}{{ m | tojson }}{% endgeneration %}\n{%- endfor %}\n"
        "  {% set ns = namespace(n=1) %}{{ ns.n }}{{ {'b': '<é>', 'a': [1]} | tojson(indent=2) }}"
    )
    messages = [
        {"role": "user", "content": "<b>&'é"},
        {"role": "assistant", "content": "x\ny"},
        {"role": "user", "content": ""},
    ]
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered = render_jinja_template([messages], chat_template=source)
    expected = rendered[0] if isinstance(rendered[0], str) else rendered[0][0]
    assert compile_template(source).render(messages=messages) == expected


CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "Be brief.\n"},
        {"role": "user", "content": "Hi <|im_end|> 日本 😀  12 345"},
    ],
    [
        {"role": "user", "content": "def f(x):\n    return x"},
        {"role": "assistant", "content": "Looks  fine."},
        {"role": "user", "content": "  sure?  "},
    ],
]


@pytest.mark.model
def test_chat_prompts_of_the_real_model_equal_transformers() -> None:
    from transformers import AutoTokenizer

    from specbridge.models import resolve_target

    folder = resolve_target("smollm2-135m")
    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    for messages, prompted in itertools.product(CHATS, [True, False]):
        options: dict[str, Any] = {"add_generation_prompt": prompted}
        assert ours.render_chat(messages, **options) == theirs.apply_chat_template(
            messages, tokenize=False, **options
        )
        ids = list(
            theirs.apply_chat_template(messages, tokenize=True, return_dict=True, **options)["input_ids"]
        )
        assert ours.encode_chat(messages, **options) == ids
        assert ours.encode(messages[-1]["content"]) == theirs(messages[-1]["content"])["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert run(ours.stream(), [[i] for i in ids])[0] == ours.decode(ids)


def test_a_plain_prompt_gets_the_post_processors_tokens() -> None:
    backend = byte_backend()
    from tokenizers.processors import TemplateProcessing

    bos = backend.token_to_id("<|im_start|>")
    backend.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)]
    )
    tokenizer = Tokenizer(backend, chat_template=CHAT_TEMPLATE)
    assert tokenizer.encode("a")[0] == bos
    assert tokenizer.encode_chat([{"role": "user", "content": "a"}]).count(bos) == 2
