"""The model's tokenizer and chat template, read from its folder without torch or transformers.

Owns: encoding prompts and chats, decoding ids, which ids are special or end a text, the sampling defaults
of the model's generation_config. Does not own incremental decoding and stop strings (gateway.detokenize).
Chat prompts equal transformers' `apply_chat_template` on the same folder.
"""

from __future__ import annotations

import datetime
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import tokenizers

from gateway.detokenize import ByteLevelDecoder, ByteTable, StreamDecoder, TextStream, TokenDecoder
from specbridge.errors import ConfigError, InvalidRequest

log = logging.getLogger(__name__)


def unicode_bytes(text: str, what: str, param: str | None = None) -> bytes:
    """`text` in UTF-8. Raises InvalidRequest naming `what` if it holds half of a surrogate pair."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{what} has a lone surrogate U+{ord(text[error.start]):04X} at character {error.start}; "
            "send whole characters",
            param=param,
        ) from None


STAND_IN_TEMPLATE = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request that leaves a field out gets: the model's generation_config, else OpenAI's defaults."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; here it only renders."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes <, > and & for HTML; a prompt must not.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def compile_template(source: str) -> jinja2.Template:
    """A chat template with the helpers templates in the wild rely on, in a sandbox: it is untrusted code."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ConfigError(f"the model's chat template does not compile: {error}; fix the template") from error


class Tokenizer:
    """Text ↔ ids of one model. `load(folder)` reads it; all methods may be called from several threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        template_variables: Mapping[str, str] | None = None,
        eos_token_ids: Iterable[int] = (),
        defaults: SamplingDefaults | None = None,
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._template = compile_template(chat_template) if chat_template else None
        self._variables = dict(template_variables or {})
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.defaults = defaults or SamplingDefaults()
        self.special_token_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.longest_token = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
        """Most characters of text that one id can stand for."""
        self._byte_tables: dict[bool, ByteTable] = {}
        if self._is_byte_level():
            self._byte_tables = {
                True: ByteTable(backend, skip=self.special_token_ids),
                False: ByteTable(backend),
            }

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json and beside it tokenizer_config, chat_template, generation_config and config.

        Raises ConfigError if tokenizer.json is missing or anything in these files does not parse.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"{folder} has no tokenizer.json; the fast tokenizer's file is needed beside the weights"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception
            raise ConfigError(f"{path} is not a tokenizer file: {error}") from error
        config = _read_json(folder / "tokenizer_config.json")
        generation = _read_json(folder / "generation_config.json")
        _add_missing_tokens(backend, config)
        variables = _template_variables(_read_json(folder / "special_tokens_map.json"))
        variables.update(_template_variables(config))
        return cls(
            backend,
            chat_template=_find_template(folder, config),
            template_variables=variables,
            eos_token_ids=_eos_ids(
                backend,
                generation=generation,
                model=_read_json(folder / "config.json"),
                variables=variables,
            ),
            defaults=_sampling_defaults(folder, generation),
        )

    @classmethod
    def stand_in(cls, folder: Path | None) -> Tokenizer:
        """For a model without a tokenizer: a token a byte, and one that reads `<id>` for each id beyond.

        folder: the model's, for its vocabulary and end-of-text ids; None: bytes only. Raises ConfigError.
        """
        model = _read_json(folder / "config.json") if folder else {}
        generation = _read_json(folder / "generation_config.json") if folder else {}
        alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        vocab = {symbol: index for index, symbol in enumerate(alphabet)}
        vocab |= {f"<{index}>": index for index in range(len(vocab), int(model.get("vocab_size", 0)))}
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        return cls(
            backend,
            chat_template=STAND_IN_TEMPLATE,
            eos_token_ids=_eos_ids(backend, generation=generation, model=model, variables={}),
        )

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows; the model's vocabulary may be padded beyond."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def misfit(self, vocab_size: int, eos_token_ids: Iterable[int]) -> str:
        """Why a model with this vocabulary and these end-of-text ids is another one; "" if it fits.

        A model that names no end of text is not compared with: a tokenizer may know of one all the same.
        """
        theirs = frozenset(eos_token_ids)
        fix = "start gateway and target with the same --target"
        if self.vocab_size > vocab_size:
            return (
                f"the tokenizer knows {self.vocab_size} ids, the target's model only {vocab_size}: they "
                f"don't belong together; {fix}"
            )
        if theirs and theirs != frozenset(self.eos_token_ids):
            return (
                f"the tokenizer's end-of-text ids are {sorted(self.eos_token_ids)}, the target's "
                f"{sorted(theirs)}: they don't belong together; {fix}"
            )
        return ""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a raw prompt; special tokens (a leading BOS) as the tokenizer's post-processor says.

        Raises InvalidRequest for text that is not Unicode (half of a surrogate pair, as JSON escapes allow).
        """
        unicode_bytes(text, "the text")
        # Unlike encode(), the batch form lets other threads run; "fast" leaves out offsets nobody reads.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a chat. Raises InvalidRequest if the model has no template or it refuses."""
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template; use /v1/completions with a prompt", param="messages"
            )
        names = {
            **self._variables,
            **(variables or {}),
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        names.setdefault("tools", None)
        names.setdefault("documents", None)
        try:
            return self._template.render(**names)
        except Exception as error:  # templates are foreign code: TypeError, KeyError, anything
            raise InvalidRequest(
                f"the model's chat template refused the messages: {error}", param="messages"
            ) from error

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a chat prompt. The template writes the special tokens itself, so none are added."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, variables=variables)
        return self.encode(text, add_special_tokens=False)

    def token_text(self, token_id: int) -> str:
        """The vocabulary's own spelling of one id (byte-level stand-ins and all); "" for unknown ids."""
        return self._backend.id_to_token(token_id) or ""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """One-shot decoding; incomplete characters become U+FFFD. Lets other threads run."""
        [text] = self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return str(text)

    def decoder(self, *, skip_special_tokens: bool = True) -> TokenDecoder:
        """A fresh incremental decoder."""
        if self._byte_tables:
            return ByteLevelDecoder(self._byte_tables[skip_special_tokens])
        return StreamDecoder(self._backend, skip_special_tokens=skip_special_tokens)

    def stream(
        self,
        stops: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> TextStream:
        """The text side of one request."""
        decoder = self.decoder(skip_special_tokens=skip_special_tokens)
        return TextStream(decoder, stops, min_tokens=min_tokens, include_stop=include_stop)

    def _is_byte_level(self) -> bool:
        decoder = json.loads(self._backend.to_str()).get("decoder") or {}
        parts = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
        return [part.get("type") for part in parts] == ["ByteLevel"]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}; it must be a JSON object")
    return value


def _token_text(value: Any) -> str | None:
    """A token as tokenizer_config writes it: its text, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _template_variables(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token … as templates see them."""
    texts = {name: _token_text(value) for name, value in config.items() if name.endswith("_token")}
    return {name: text for name, text in texts.items() if text is not None}


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Tokens that only tokenizer_config lists; ids are checked, as the weights depend on them."""
    for key, value in sorted(
        (config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0])
    ):
        text = _token_text(value)
        if text is None or backend.token_to_id(text) is not None:
            continue
        flags = {n: value[n] for n in ("lstrip", "rstrip", "single_word", "normalized") if n in value}
        token = tokenizers.AddedToken(text, special=bool(value.get("special")), **flags)
        (backend.add_special_tokens if value.get("special") else backend.add_tokens)([token])
        if backend.token_to_id(text) != int(key):
            raise ConfigError(
                f"tokenizer_config.json gives {text!r} the id {key}, tokenizer.json leads to "
                f"{backend.token_to_id(text)}; the two files do not belong together"
            )


def _find_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = _read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = {item.get("name"): item.get("template") for item in template}
        template = named.get("default")
    return template if isinstance(template, str) and template else None


def _eos_ids(
    backend: tokenizers.Tokenizer,
    *,
    generation: Mapping[str, Any],
    model: Mapping[str, Any],
    variables: Mapping[str, str],
) -> list[int]:
    """The first of generation_config, config, tokenizer_config that names one."""
    for source in (generation, model):
        value = source.get("eos_token_id")
        if value is not None:
            return [int(item) for item in (value if isinstance(value, list) else [value])]
    token_id = backend.token_to_id(variables.get("eos_token", ""))
    return [] if token_id is None else [token_id]


def _sampling_defaults(folder: Path, generation: Mapping[str, Any]) -> SamplingDefaults:
    values: dict[str, Any] = {}
    for name, kind in (("temperature", float), ("top_k", int), ("top_p", float), ("min_p", float)):
        value = generation.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(
                f"{folder / 'generation_config.json'}: {name} is {value!r}; it must be a number"
            )
        values[name] = kind(value)
    for name, neutral in (("repetition_penalty", 1.0), ("presence_penalty", 0.0), ("frequency_penalty", 0.0)):
        if generation.get(name) not in (None, neutral):
            log.warning("generation_config.json asks for %s=%r, which is not supported yet and not applied",
                        name, generation[name])  # fmt: skip
    return SamplingDefaults(**values)
