"""What `specbridge train fit` can be told, and what it does by default for a target of some size.

Owns flags, the recipe file, and every default that depends on the target or the data (`Recipe`). Does not own
what the values do.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from draft_service.drafter_config import TargetFacts, build_target_layer_ids
from specbridge.checkpoint import read_json
from specbridge.errors import ConfigError
from specbridge.settings import Settings, load

LOSSES = ("ce", "kl", "l1", "coupled")
DEFAULT_TAPS = 5
EPOCHS = 6


class FitSettings(Settings):
    """How a drafter is trained. 0, -1 or an empty text leave a choice to the target's size or the data."""

    config: str = ""
    """Recipe file, TOML or JSON, with any of these fields; options given beside it win."""
    target: str = "smollm2-135m"
    """Target to draft for: a folder, a Hugging Face id or a built-in name."""
    data: str = ""
    """Folder of training data, or several with commas between."""
    out: str = ""
    """Folder for the drafter; the run's state and log go to its subfolder `run`."""
    init: str = ""
    """Drafter folder to start from (its layers, block size and taps are kept); empty: random weights."""
    resume: bool = False
    """Continue the run in --out from its last checkpoint, as if it had never stopped."""

    layers: int = Field(default=0, ge=0, le=64)
    """Drafter layers."""
    block_size: int = Field(default=0, ge=0, le=64)
    """Rows of a block, the anchor's included: one more than the tokens proposed."""
    taps: str = ""
    """Target layers whose outputs the drafter sees, counted from 0: "1,8,14,20,27"."""
    intermediate_size: int = Field(default=0, ge=0)
    """Width of the drafter's MLPs; 0: the target's."""
    mask_token_id: int = Field(default=-1, ge=-1)
    """Token that fills the block's unknown rows; -1: a reserved token that the data never uses."""

    loss: str = "ce"
    """Terms and weights, "ce" or "ce:0.1,l1:0.9". ce: cross-entropy against the response's token; kl, l1:
    forward divergence, absolute distance to the target's distribution there; coupled: cross-entropy under
    fresh shared noise against what the target would choose with it.
    """
    gamma: float = Field(default=0.0, ge=0.0)
    """Depth k counts exp(-(k-1)/gamma); 0: by block size (16: 7, 10: 5, 8: 4)."""
    distill_temperature: float = Field(default=1.0, gt=0.0, le=100.0)
    """Temperature of both distributions in kl, l1 and coupled."""
    reach: float = Field(default=0.0, ge=0.0, le=4.0)
    """Above 0: a row also counts by this power of the probability that the rows before it in its block are
    right; needs the term ce.
    """

    rows: int = Field(default=0, ge=0)
    """Rows of tokens a GPU takes at once."""
    row_tokens: int = Field(default=0, ge=0)
    """Tokens of a row; short responses share one, longer ones are cut."""
    anchors: int = Field(default=0, ge=0)
    """Blocks drawn a row, anew each step."""
    accumulate: int = Field(default=1, ge=1)
    """Batches of rows per GPU and step."""
    gpus: int = Field(default=1, ge=1, le=64)
    """GPUs of this machine, a process each. (Under torchrun leave it at 1.)"""

    steps: int = Field(default=0, ge=0)
    """Optimiser steps; 0: as many as --epochs are."""
    epochs: float = Field(default=EPOCHS, gt=0.0)
    """Times the data is gone through."""
    minutes: float = Field(default=0.0, ge=0.0)
    """Stop after this time, with the learning rate's schedule fitted to it; 0: no limit. The log says how
    many steps it was, which as --steps gives the same drafter again.
    """
    learning_rate: float = Field(default=6e-4, gt=0.0, le=1.0)
    """Peak of the cosine schedule."""
    warmup: float = Field(default=0.04, ge=0.0, lt=1.0)
    """Share of the steps in which the learning rate rises."""
    weight_decay: float = Field(default=0.01, ge=0.0)
    """Of matrices; norms have none."""
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """AdamW's first-moment decay."""
    beta2: float = Field(default=0.95, ge=0.0, lt=1.0)
    """AdamW's second-moment decay."""
    clip: float = Field(default=1.0, gt=0.0)
    """Largest norm of a step's gradient."""

    temperatures: str = ""
    """Train on responses of these temperatures only: "0,1"; empty: all."""
    greedy_share: float = Field(default=-1.0, ge=-1.0, le=1.0)
    """Share of greedy responses, reached by leaving out others; -1: as in the data."""
    data_share: float = Field(default=1.0, gt=0.0, le=1.0)
    """Share of the responses that is used."""
    holdout: int = Field(default=256, ge=0)
    """Responses kept for the estimate of acceptance, at most a tenth of all."""
    seed: int = Field(default=0, ge=0)
    """Of weights, data order and anchors."""

    device: str = "auto"
    """"cpu", "cuda", "cuda:1"; "auto" takes a GPU if there is one."""
    dtype: Literal["auto", "float64", "float32", "bfloat16"] = "auto"
    """Of the arithmetic (the weights being trained are float32); "auto": bfloat16 on a GPU, float32 else."""
    attention: Literal["auto", "dense", "split"] = "auto"
    """Blocks' attention: all scores at once, or context and block apart, merged. Equal results."""
    cuda_graphs: bool = True
    """On a GPU, replay the step as CUDA graphs. Off: the same steps, slower."""
    threads: int = Field(default=0, ge=0)
    """Compute threads; 0: the library's choice."""

    checkpoint_every: int = Field(default=1000, ge=0)
    """Steps between checkpoints; 0: only at the end."""
    estimate_every: int = Field(default=0, ge=0)
    """Steps between estimates of acceptance; 0: ten a run."""
    log_every: int = Field(default=20, ge=1)
    """Steps between lines of the log."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe log lines shown."""


def load_fit(flags: Mapping[str, Any]) -> FitSettings:
    """Settings from flags over the recipe file that they name over the environment. Raises ConfigError."""
    values: dict[str, Any] = {}
    if flags.get("config"):
        values = _read_recipe(Path(str(flags["config"])))
    return load(FitSettings, **{**values, **flags})


def _read_recipe(path: Path) -> dict[str, Any]:
    if path.suffix == ".json":
        values = read_json(path)
    else:
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"--config: {path} is missing") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"--config: {path} does not parse as TOML: {error}") from error
    unknown = sorted(set(values) - set(FitSettings.model_fields))
    if unknown:
        raise ConfigError(f"{path}: {', '.join(unknown)} is no option of train fit; its --help lists them")
    return values


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides what the weights become, with no choice left open: resuming needs it equal.

    losses: term -> weight. total_rows: rows of all ranks and of accumulation in one step.
    """

    layers: int
    block_size: int
    taps: tuple[int, ...]
    intermediate_size: int
    losses: dict[str, float]
    gamma: float
    distill_temperature: float
    reach: float
    rows: int
    row_tokens: int
    anchors: int
    batches_per_step: int
    learning_rate: float
    warmup: float
    weight_decay: float
    betas: tuple[float, float]
    clip: float
    temperatures: tuple[float, ...]
    greedy_share: float
    data_share: float
    holdout: int
    seed: int
    dtype: str
    init: str

    @property
    def tokens_per_batch(self) -> int:
        return self.rows * self.row_tokens

    @property
    def blocks_per_batch(self) -> int:
        return self.rows * self.anchors

    def as_dict(self) -> dict[str, Any]:
        """For JSON: lists for tuples."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class _Size:
    """Defaults for targets up to `hidden` wide."""

    hidden: int
    layers: int
    block_size: int
    rows: int
    row_tokens: int
    anchors: int


# Rows are as long as that size's responses are; anchors keep the head's rows about as many as fill a GPU.
_SIZES = (
    _Size(hidden=256, layers=2, block_size=8, rows=4, row_tokens=256, anchors=32),
    _Size(hidden=1024, layers=3, block_size=8, rows=16, row_tokens=512, anchors=64),
    _Size(hidden=2048, layers=4, block_size=16, rows=8, row_tokens=1024, anchors=128),
    _Size(hidden=1 << 30, layers=5, block_size=16, rows=4, row_tokens=3072, anchors=512),
)


def make_recipe(
    settings: FitSettings, facts: TargetFacts, *, intermediate_size: int, dtype: str, ranks: int
) -> Recipe:
    """Settings with the defaults for this target filled in. Raises ConfigError for what can't be trained."""
    size = next(s for s in _SIZES if facts.hidden_size <= s.hidden)
    block = settings.block_size or size.block_size
    layers = settings.layers or size.layers
    if block < 2:
        raise ConfigError(f"--block-size is {block}: a block needs the anchor and at least one proposal")
    taps = _numbers(settings.taps, "--taps", int) or _default_taps(facts.num_layers)
    if len(set(taps)) != len(taps) or any(not 0 <= i < facts.num_layers for i in taps):
        raise ConfigError(f"--taps {settings.taps!r} must be different layers of 0..{facts.num_layers - 1}")
    losses = parse_loss(settings.loss)
    if settings.reach and "ce" not in losses:
        raise ConfigError(
            f"--reach {settings.reach} needs the term ce, which --loss {settings.loss!r} has not"
        )
    row_tokens = settings.row_tokens or size.row_tokens
    if facts.max_length:
        row_tokens = min(row_tokens, facts.max_length)
    if row_tokens < block + 2:
        raise ConfigError(f"--row-tokens is {row_tokens}: too short for a prompt and a block of {block}")
    return Recipe(
        layers=layers,
        block_size=block,
        taps=taps,
        intermediate_size=settings.intermediate_size or intermediate_size,
        losses=losses,
        gamma=settings.gamma or default_gamma(block),
        distill_temperature=settings.distill_temperature,
        reach=settings.reach,
        rows=settings.rows or size.rows,
        row_tokens=row_tokens,
        anchors=settings.anchors or size.anchors,
        batches_per_step=settings.accumulate * ranks,
        learning_rate=settings.learning_rate,
        warmup=settings.warmup,
        weight_decay=settings.weight_decay,
        betas=(settings.beta1, settings.beta2),
        clip=settings.clip,
        temperatures=_numbers(settings.temperatures, "--temperatures", float),
        greedy_share=settings.greedy_share,
        data_share=settings.data_share,
        holdout=settings.holdout,
        seed=settings.seed,
        dtype=dtype,
        init=settings.init,
    )


def default_gamma(block_size: int) -> float:
    """The paper's 7, 5 and 4 for blocks of 16, 10 and 8, and the line through the outer two between.

    >>> [default_gamma(n) for n in (8, 12, 16)]
    [4.0, 5.5, 7.0]
    """
    return 5.0 if block_size == 10 else max(1.0, 4.0 + (block_size - 8) * 3 / 8)


def parse_loss(text: str) -> dict[str, float]:
    """Term -> weight.

    >>> parse_loss("ce:0.1, l1:0.9")
    {'ce': 0.1, 'l1': 0.9}
    """
    terms: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition(":")
        try:
            weight = float(number) if number else 1.0
        except ValueError:
            weight = -1.0
        if name not in LOSSES or name in terms or not 0 < weight < 1e6:
            raise ConfigError(
                f"--loss {text!r}: {part.strip()!r} is not one of {', '.join(LOSSES)} with a weight"
            )
        terms[name] = weight
    return terms


def _default_taps(num_layers: int) -> tuple[int, ...]:
    """As many as there are layers for between the second and the third last, at most DEFAULT_TAPS."""
    return build_target_layer_ids(num_layers, max(1, min(DEFAULT_TAPS, num_layers - 3)))


def _numbers(text: str, flag: str, kind: Any) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in text.split(",")) if text.strip() else ()
    except ValueError:
        raise ConfigError(f"{flag} {text!r} must be numbers with commas between") from None
