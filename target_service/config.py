"""Settings of the target service: every field is a flag and an environment variable.

Owns which values and combinations are legal. What depends on the loaded model (its length, its heads) is
checked where the model is known, in target_service.server.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from specbridge.acceptance_model import label as acceptance_label
from specbridge.errors import ConfigError
from specbridge.settings import Settings

PAGE_SIZE = 16
"""Tokens of one KV page. A constant of the design: prefix hashes and the draft's pages use it too."""


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


class TargetSettings(Settings):
    """What `specbridge target` is started with."""

    target: str = "smollm2-135m"
    """The model: a local folder, a Hugging Face id, or the built-in `smollm2-135m`."""
    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy`: random weights of the configuration's shape, no checkpoint read; to measure time only."""
    config: str = ""
    """With load-format dummy: the model's config.json, or a folder that holds one; empty: --target's."""
    simulate_acceptance: str = ""
    """Make the text up so that a simulating drafter is right as often as this acceptance file, or a mean
    acceptance length, says; the draft needs the same. Nothing generated means anything. Empty: off.
    """
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:N`, or `auto`: the first GPU if there is one."""
    dtype: Literal["auto", "float64", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the weights; `auto`: the checkpoint's."""
    tp: int = Field(default=1, ge=1)
    """Tensor-parallel ranks; each is a process of its own."""
    listen: str = "127.0.0.1:0"
    """gRPC address: `host:port` (port 0 picks one and logs it) or `unix:/path`."""
    metrics_host: str = "127.0.0.1"
    """Host that /metrics listens on."""
    metrics_port: int = Field(default=0, ge=-1, le=65535)
    """Port of /metrics; 0 picks one and logs it, -1 turns the endpoint off."""
    max_length: int = Field(default=0, ge=0)
    """Most tokens, prompt and output, of one session; 0: the model's own length."""
    kv_tokens: int = Field(default=0, ge=0)
    """Committed tokens that the KV pages hold in all; 0: on a GPU what is left of it, on a CPU 4 sessions of
    max_length, at most 64 Ki tokens.
    """
    gpu_memory_fraction: float = Field(default=0.9, gt=0, le=1)
    """Part of a GPU's memory in use once this service runs, other processes' share included."""
    gpu_reserve: float = Field(default=0.0, ge=0)
    """GiB of each GPU left to other processes, as to a draft service on the same GPU; `serve` sets it."""
    launcher: Literal["auto", "none", "torchrun"] = "auto"
    """Who starts the ranks: this process (`none`), or `torchrun`, whose environment says which one this is;
    `auto`: torchrun if it started this process.
    """
    rank_interface: str = ""
    """Network interface over which ranks of several hosts exchange messages; empty: the one that leads to the
    first host.
    """
    prefix_cache: bool = True
    """Keep released pages as reusable prefixes; off with `deterministic`."""
    max_sessions: int = Field(default=256, ge=1)
    """Most open sessions; one more is answered RESOURCE_EXHAUSTED."""
    max_tree_nodes: int = Field(default=64, ge=0, le=1024)
    """Largest draft tree accepted per session, root not counted."""
    max_verify_rows: int = Field(default=0, ge=0)
    """Most verify rows of one forward; a larger batch runs as several. 0: 8 full trees or 256, the larger."""
    prefill_chunk: int = Field(default=0, ge=0)
    """Most prompt rows of one forward; 0: 128 on a CPU, 1024 on a GPU."""
    max_itl_ms: float = Field(default=0.0, ge=0)
    """Goal, in milliseconds, for a round's time at the target while prompts run beside it: prompt chunks are
    cut to keep it, as far as the passes' measured times tell. 0: twice a round without prompts.
    """
    deterministic: bool = False
    """One session a forward, rows padded to fixed buckets, no prefix cache: the same request with the same
    draft trees gives the same bits whatever else runs, unless KV pages run short. Slower.
    """
    cuda_graphs: bool = True
    """On a GPU, capture passes that recur in CUDA graphs; off, the same passes launch by launch."""
    session_lease: float = Field(default=10.0, gt=0)
    """Seconds that sessions outlive a broken Rounds stream."""
    idle_lease: float = Field(default=600.0, gt=0)
    """Seconds without a verify after which a session is freed although its peer is connected."""
    channel_slots: int = Field(default=4096, ge=1)
    """Rows of the hidden-state ring, unless the draft asks for fewer."""
    channel_lease: float = Field(default=10.0, gt=0)
    """Seconds without an ack after which an attached draft with unread chunks is detached."""
    capture_wait: float = Field(default=0.5, ge=0)
    """Longest that a prefill chunk waits for ring slots, in seconds, before it runs uncaptured."""
    recapture_interval: float = Field(default=1.0, ge=0)
    """Least seconds between two re-captures of one session."""
    warmup_repeats: int = Field(default=3, ge=0)
    """Passes per point of the verify-cost curve; 0: do not measure."""
    threads: int = Field(default=0, ge=0)
    """Compute threads of this process; 0: leave the libraries' choice."""
    drain: float = Field(default=5.0, ge=0)
    """Seconds that calls under way get on SIGTERM."""
    log_level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_lower)] = "info"
    """Least severe log lines shown."""

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        if self.max_length and self.kv_tokens and self.kv_tokens < self.max_length:
            raise ValueError(
                f"kv_tokens {self.kv_tokens} is below max_length {self.max_length}: one session would not "
                "fit; raise kv_tokens or lower max_length"
            )
        if self.kv_tokens and self.kv_tokens < PAGE_SIZE:
            raise ValueError(
                f"kv_tokens {self.kv_tokens} is less than one page of {PAGE_SIZE} tokens; raise it"
            )
        if self.max_length == 1:
            raise ValueError("max_length 1 leaves no room for output; use at least 2")
        if self.max_verify_rows and self.max_verify_rows < self.max_tree_nodes + 1:
            raise ValueError(
                f"max_verify_rows {self.max_verify_rows} can't hold one tree of max_tree_nodes "
                f"{self.max_tree_nodes} and its root; raise it to {self.max_tree_nodes + 1} or more"
            )
        if self.channel_slots <= self.max_tree_nodes:
            raise ValueError(
                f"channel_slots {self.channel_slots} can't hold the rows of a verify pass of max_tree_nodes "
                f"{self.max_tree_nodes}; raise it to {self.max_tree_nodes + 1} or more"
            )
        if self.config and self.load_format != "dummy":
            raise ValueError(
                f"config {self.config!r} is read with load_format dummy only; a real model brings its own, "
                "name it with --target"
            )
        if self.device == "cpu" and self.dtype == "float16":
            raise ValueError("float16 on a CPU overflows in common models; use bfloat16, float32 or auto")
        if self.tp > 1 and self.deterministic:
            raise ValueError(
                "deterministic is not available with tp > 1: the order of an all-reduce's sums is the "
                "communication library's; use tp 1"
            )
        return self


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings with every "0: choose for me" resolved against the loaded model and device.

    num_pages: 0 until a GPU's memory has been planned.
    """

    num_pages: int
    page_size: int
    max_length: int
    max_sessions: int
    max_tree_nodes: int
    max_verify_rows: int
    prefill_chunk: int
    channel_slots: int
    deterministic: bool = False
    prefix_cache: bool = True
    max_itl_ms: float = 0.0
    session_lease: float = 10.0
    idle_lease: float = 600.0
    capture_wait: float = 0.5
    recapture_interval: float = 1.0
    warmup_repeats: int = 0
    simulated_acceptance: str = ""
    """Label of the acceptance that is simulated; empty: none."""

    @property
    def keep_prefixes(self) -> bool:
        """Not in deterministic mode: a page rounds as the pass that made it did, a prompt's or a round's."""
        return self.prefix_cache and not self.deterministic

    @property
    def max_rows(self) -> int:
        """Most rows of one forward pass."""
        return self.max_verify_rows + 2 * self.prefill_chunk

    def with_pages(self, num_pages: int) -> Limits:
        """The same with so many K/V pages; no session can be longer than they hold."""
        return replace(self, num_pages=num_pages, max_length=min(self.max_length, num_pages * self.page_size))


@dataclass(frozen=True, slots=True)
class MemoryRules:
    """What the settings say. fraction: of a GPU's memory, all processes together. reserve: bytes promised to
    other processes. kv_tokens: asked for, 0: what is left. max_length: of a session; fixed: the user's own
    word and not to be lowered. max_sessions, ring_slots, verify_rows: as in Limits. graphs: passes are
    captured.
    """

    fraction: float
    reserve: int
    kv_tokens: int
    max_length: int
    fixed_length: bool
    max_sessions: int
    ring_slots: int
    verify_rows: int
    graphs: bool


def resolve_limits(settings: TargetSettings, *, model_length: int, device: str) -> Limits:
    """Raises ConfigError if the settings ask for more than the model has.

    model_length: positions the model was made for. device: "cpu", "cuda" or "cuda:N".
    """
    if settings.max_length > model_length:
        raise ConfigError(
            f"--max-length {settings.max_length} is beyond the model's {model_length} positions; lower it"
        )
    max_length = settings.max_length or model_length
    kv_tokens = settings.kv_tokens
    if not kv_tokens and device == "cpu":
        kv_tokens = max(max_length, min(4 * max_length, 65536))
    limits = Limits(
        num_pages=0,
        page_size=PAGE_SIZE,
        max_length=max_length,
        max_sessions=settings.max_sessions,
        max_tree_nodes=settings.max_tree_nodes,
        max_verify_rows=settings.max_verify_rows or max(256, 8 * (settings.max_tree_nodes + 1)),
        prefill_chunk=settings.prefill_chunk or (128 if device == "cpu" else 1024),
        channel_slots=settings.channel_slots,
        deterministic=settings.deterministic,
        prefix_cache=settings.prefix_cache,
        max_itl_ms=settings.max_itl_ms,
        session_lease=settings.session_lease,
        idle_lease=settings.idle_lease,
        capture_wait=settings.capture_wait,
        recapture_interval=settings.recapture_interval,
        warmup_repeats=settings.warmup_repeats,
        simulated_acceptance=acceptance_label(settings.simulate_acceptance),
    )
    return limits.with_pages(-(-kv_tokens // PAGE_SIZE)) if kv_tokens else limits


def memory_rules(settings: TargetSettings, limits: Limits) -> MemoryRules:
    """What the settings say about a GPU's memory."""
    return MemoryRules(
        fraction=settings.gpu_memory_fraction,
        reserve=int(settings.gpu_reserve * (1 << 30)),
        kv_tokens=settings.kv_tokens,
        max_length=limits.max_length,
        fixed_length=bool(settings.max_length),
        max_sessions=limits.max_sessions,
        ring_slots=limits.channel_slots,
        verify_rows=limits.max_verify_rows,
        graphs=settings.cuda_graphs,
    )
