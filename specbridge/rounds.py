"""Domain messages of the draft → verify rounds: what the wire carries, as plain frozen dataclasses.

The services' engines and the gateway's scheduler speak these; specbridge.wire converts them to and
from protobuf. Field meanings and units are those of protos/*.proto.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from specbridge.errors import InvalidRequest, SpecBridgeError, Unsupported
from specbridge.tree import EMPTY_TREE, DraftTree

GREEDY_BELOW = 1e-5
"""A temperature below this means greedy decoding (no noise, lowest id wins ties)."""

GATEWAY_ID_BYTES = 16
"""Length of a gateway process's random id."""


@dataclass(frozen=True, slots=True)
class SessionKey:
    """One session of one gateway process; a re-open raises `incarnation`."""

    gateway: bytes
    number: int
    incarnation: int = 0

    def __str__(self) -> str:
        return f"{self.gateway[:4].hex()}/{self.number}.{self.incarnation}"

    def validate(self) -> None:
        """Raises InvalidRequest for a gateway id that is none: two clients could have the same."""
        if len(self.gateway) != GATEWAY_ID_BYTES:
            raise InvalidRequest(
                f"the session's gateway id has {len(self.gateway)} bytes; draw {GATEWAY_ID_BYTES} random "
                "ones once at start",
                param="session",
            )


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is chosen from the target's logits (docs/architecture.md, the commit rule)."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def validate(self) -> None:
        """Raises InvalidRequest (Unsupported for features not built) naming field, value and legal range."""
        for name, ok, legal in (
            ("temperature", 0.0 <= self.temperature <= 100.0, "in [0, 100]"),
            ("top_k", 0 <= self.top_k < 2**31, "0 (off) or an integer below 2^31"),
            ("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("min_p", 0.0 <= self.min_p < 1.0, "in [0, 1)"),
        ):
            if not ok:
                raise InvalidRequest(f"{name} is {getattr(self, name)!r}; it must be {legal}", param=name)
        for name, neutral in (
            ("repetition_penalty", 1.0),
            ("presence_penalty", 0.0),
            ("frequency_penalty", 0.0),
        ):
            if getattr(self, name) != neutral:
                raise Unsupported(f"{name} is not supported yet; leave it at {neutral}", param=name)
        if self.logit_bias:
            raise Unsupported("logit_bias is not supported yet; leave it out", param="logit_bias")


MAX_STOP_TOKEN_IDS = 256
"""Most `stop_token_ids` of one request."""


def check_token_ids(ids: Sequence[int], vocab_size: int, *, name: str) -> None:
    """Raises InvalidRequest, naming the field and the id, unless all are in [0, vocab_size)."""
    if not ids:
        return
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        raise InvalidRequest(
            f"{name} holds token id {low if low < 0 else high}; ids must be in [0, {vocab_size}), the "
            "model's vocabulary",
            param=name,
        )


@dataclass(frozen=True, slots=True)
class StopParams:
    """When the target ends the text by itself. `max_tokens` counts from prompt_length."""

    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False

    def validate(self, *, vocab_size: int) -> None:
        """Raises InvalidRequest naming field, value and legal range."""
        if self.max_tokens < 1:
            raise InvalidRequest(
                f"max_tokens is {self.max_tokens}; it must be at least 1", param="max_tokens"
            )
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}; it must be in [0, {self.max_tokens}], the most tokens of "
                "this request",
                param="min_tokens",
            )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(
                f"{len(self.stop_token_ids)} stop_token_ids are given; {MAX_STOP_TOKEN_IDS} are the most",
                param="stop_token_ids",
            )
        check_token_ids(self.stop_token_ids, vocab_size, name="stop_token_ids")


class FinishReason(IntEnum):
    """Values equal the wire's FinishReason."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3

    @property
    def openai(self) -> str | None:
        return {0: None, 1: "stop", 2: "length", 3: "abort"}[int(self)]


@dataclass(frozen=True, slots=True)
class CostPoint:
    """Median wall time of a pass of `rows` rows over `context` committed tokens."""

    rows: int
    context: int
    time_ns: int


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a pass of a service reads (protos/common.proto). Bytes; copy_bytes_per_s 0: not measured."""

    weight_bytes: int = 0
    products_per_row: int = 0
    kv_bytes_per_token: int = 0
    num_kv_heads: int = 0
    copy_bytes_per_s: int = 0
    append_weight_bytes: int = 0


# ---- target ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TargetInfo:
    model_id: str
    fingerprint: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    hidden_size: int
    num_layers: int
    page_size: int
    max_length: int
    tp_size: int
    max_sessions: int
    max_tree_nodes: int
    total_pages: int
    dtype: str
    device: str
    instance: bytes
    verify_cost: tuple[CostPoint, ...] = ()
    channel_transport: str = "none"
    channel_reason: str = ""
    deterministic: bool = False
    dummy_weights: bool = False
    simulated_acceptance: str = ""
    footprint: Footprint = Footprint()


@dataclass(frozen=True, slots=True)
class TargetOpen:
    """priority: lower is prefilled first and preempted last. age_ms: since the request began, over all its
    incarnations; of equal priority the youngest is preempted. draft_absent: the draft has no such session, so
    nothing is captured for it until it asks."""

    session: SessionKey
    tokens: tuple[int, ...]
    prompt_length: int
    sampling: SamplingParams
    stop: StopParams
    draft_prefix: int = 0
    speculate: bool = True
    cache_salt: bytes = b""
    want_logprobs: int = 0
    priority: int = 0
    age_ms: int = 0
    draft_absent: bool = False


@dataclass(frozen=True, slots=True)
class Verify:
    """defer_rows: the draft will not be asked right after this round, so its rows may be announced later."""

    session: SessionKey
    base: int
    tree: DraftTree = EMPTY_TREE
    defer_rows: bool = False


@dataclass(frozen=True, slots=True)
class TargetRequest:
    """A batch for the target. Releases are carried out first, then opens are queued, then trees verified."""

    batch_id: int = 0
    opens: tuple[TargetOpen, ...] = ()
    verifies: tuple[Verify, ...] = ()
    releases: tuple[SessionKey, ...] = ()


class TargetResultKind(IntEnum):
    """Values equal the wire's TargetResultKind."""

    OPENED = 1
    FIRST = 2
    VERIFIED = 3
    RELEASED = 4
    PREEMPTED = 5
    ERROR = 6


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    chosen: float
    top_ids: tuple[int, ...] = ()
    top: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class TargetResult:
    session: SessionKey
    kind: TargetResultKind
    base: int = 0
    kv_length: int = 0
    tokens: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    finish_reason: FinishReason = FinishReason.RUNNING
    cached_tokens: int = 0
    draft_has_context: bool = True
    error: SpecBridgeError | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class TargetTimings:
    """Nanoseconds; rows are counts."""

    queue_ns: int = 0
    forward_ns: int = 0
    commit_ns: int = 0
    rows: int = 0
    prefill_rows: int = 0
    service_ns: int = 0
    cold: bool = False


@dataclass(frozen=True, slots=True)
class TargetReply:
    """available_pages: KV pages that no session held when this was sent; None: the target does not say."""

    batch_id: int
    results: tuple[TargetResult, ...]
    timings: TargetTimings | None = None
    available_pages: int | None = None


# ---- draft ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DraftInfo:
    drafter_id: str
    fingerprint: str
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    max_nodes: int
    vocab_size: int
    instance: bytes
    target_fingerprint: str = ""
    draft_cost: tuple[CostPoint, ...] = ()
    channel_transport: str = "none"
    channel_reason: str = ""
    attached: bool = False
    dummy_weights: bool = False
    simulated_acceptance: str = ""
    footprint: Footprint = Footprint()
    on_arrival: bool = False


@dataclass(frozen=True, slots=True)
class DraftOpen:
    session: SessionKey
    tokens: tuple[int, ...]
    prompt_length: int
    sampling: SamplingParams
    cache_salt: bytes = b""
    recapture: bool = False
    kv_length: int = 0


@dataclass(frozen=True, slots=True)
class Propose:
    """on_arrival: asked while the round of `base` is verified, answered for where its rows end."""

    session: SessionKey
    base: int
    anchor: int
    max_nodes: int
    max_depth: int
    on_arrival: bool = False


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A batch for the draft. Releases first, then opens, then proposals."""

    batch_id: int = 0
    opens: tuple[DraftOpen, ...] = ()
    proposes: tuple[Propose, ...] = ()
    releases: tuple[SessionKey, ...] = ()


class DraftResultKind(IntEnum):
    """Values equal the wire's DraftResultKind."""

    OPENED = 1
    PROPOSED = 2
    RELEASED = 3
    ERROR = 4


@dataclass(frozen=True, slots=True)
class DraftResult:
    session: SessionKey
    kind: DraftResultKind
    base: int = 0
    tree: DraftTree = EMPTY_TREE
    draft_prefix: int = 0
    error: SpecBridgeError | None = None
    anchor: int = 0


@dataclass(frozen=True, slots=True)
class DraftTimings:
    """Nanoseconds."""

    queue_ns: int = 0
    channel_wait_ns: int = 0
    append_ns: int = 0
    forward_ns: int = 0
    tree_ns: int = 0
    service_ns: int = 0


@dataclass(frozen=True, slots=True)
class DraftReply:
    batch_id: int
    results: tuple[DraftResult, ...]
    timings: DraftTimings | None = None
