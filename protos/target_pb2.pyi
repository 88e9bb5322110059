from protos import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TargetResultKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TARGET_RESULT_KIND_UNSPECIFIED: _ClassVar[TargetResultKind]
    TARGET_RESULT_KIND_OPENED: _ClassVar[TargetResultKind]
    TARGET_RESULT_KIND_FIRST: _ClassVar[TargetResultKind]
    TARGET_RESULT_KIND_VERIFIED: _ClassVar[TargetResultKind]
    TARGET_RESULT_KIND_RELEASED: _ClassVar[TargetResultKind]
    TARGET_RESULT_KIND_PREEMPTED: _ClassVar[TargetResultKind]
    TARGET_RESULT_KIND_ERROR: _ClassVar[TargetResultKind]
TARGET_RESULT_KIND_UNSPECIFIED: TargetResultKind
TARGET_RESULT_KIND_OPENED: TargetResultKind
TARGET_RESULT_KIND_FIRST: TargetResultKind
TARGET_RESULT_KIND_VERIFIED: TargetResultKind
TARGET_RESULT_KIND_RELEASED: TargetResultKind
TARGET_RESULT_KIND_PREEMPTED: TargetResultKind
TARGET_RESULT_KIND_ERROR: TargetResultKind

class TargetInfo(_message.Message):
    __slots__ = ("model_id", "fingerprint", "vocab_size", "eos_token_ids", "hidden_size", "num_layers", "page_size", "max_length", "tp_size", "max_sessions", "max_tree_nodes", "total_pages", "dtype", "device", "verify_cost", "channel_transport", "channel_reason", "instance", "deterministic", "dummy_weights", "simulated_acceptance", "footprint")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_TREE_NODES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    VERIFY_COST_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_REASON_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    DETERMINISTIC_FIELD_NUMBER: _ClassVar[int]
    DUMMY_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    SIMULATED_ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    FOOTPRINT_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    fingerprint: str
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
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
    verify_cost: _containers.RepeatedCompositeFieldContainer[_common_pb2.CostPoint]
    channel_transport: str
    channel_reason: str
    instance: bytes
    deterministic: bool
    dummy_weights: bool
    simulated_acceptance: str
    footprint: _common_pb2.Footprint
    def __init__(self, model_id: _Optional[str] = ..., fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., hidden_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., page_size: _Optional[int] = ..., max_length: _Optional[int] = ..., tp_size: _Optional[int] = ..., max_sessions: _Optional[int] = ..., max_tree_nodes: _Optional[int] = ..., total_pages: _Optional[int] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., verify_cost: _Optional[_Iterable[_Union[_common_pb2.CostPoint, _Mapping]]] = ..., channel_transport: _Optional[str] = ..., channel_reason: _Optional[str] = ..., instance: _Optional[bytes] = ..., deterministic: _Optional[bool] = ..., dummy_weights: _Optional[bool] = ..., simulated_acceptance: _Optional[str] = ..., footprint: _Optional[_Union[_common_pb2.Footprint, _Mapping]] = ...) -> None: ...

class TargetRequest(_message.Message):
    __slots__ = ("batch_id", "open", "verify", "release")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    batch_id: int
    open: _containers.RepeatedCompositeFieldContainer[TargetOpen]
    verify: _containers.RepeatedCompositeFieldContainer[Verify]
    release: _containers.RepeatedCompositeFieldContainer[Release]
    def __init__(self, batch_id: _Optional[int] = ..., open: _Optional[_Iterable[_Union[TargetOpen, _Mapping]]] = ..., verify: _Optional[_Iterable[_Union[Verify, _Mapping]]] = ..., release: _Optional[_Iterable[_Union[Release, _Mapping]]] = ...) -> None: ...

class TargetOpen(_message.Message):
    __slots__ = ("session", "tokens", "prompt_length", "sampling", "stop", "draft_prefix", "speculate", "cache_salt", "want_logprobs", "priority", "age_ms", "draft_absent")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PREFIX_FIELD_NUMBER: _ClassVar[int]
    SPECULATE_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    WANT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ABSENT_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionKey
    tokens: _containers.RepeatedScalarFieldContainer[int]
    prompt_length: int
    sampling: _common_pb2.SamplingParams
    stop: _common_pb2.StopParams
    draft_prefix: int
    speculate: bool
    cache_salt: bytes
    want_logprobs: int
    priority: int
    age_ms: int
    draft_absent: bool
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionKey, _Mapping]] = ..., tokens: _Optional[_Iterable[int]] = ..., prompt_length: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., stop: _Optional[_Union[_common_pb2.StopParams, _Mapping]] = ..., draft_prefix: _Optional[int] = ..., speculate: _Optional[bool] = ..., cache_salt: _Optional[bytes] = ..., want_logprobs: _Optional[int] = ..., priority: _Optional[int] = ..., age_ms: _Optional[int] = ..., draft_absent: _Optional[bool] = ...) -> None: ...

class Verify(_message.Message):
    __slots__ = ("session", "base", "tree", "defer_rows")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    DEFER_ROWS_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionKey
    base: int
    tree: _common_pb2.DraftTree
    defer_rows: bool
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionKey, _Mapping]] = ..., base: _Optional[int] = ..., tree: _Optional[_Union[_common_pb2.DraftTree, _Mapping]] = ..., defer_rows: _Optional[bool] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionKey
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionKey, _Mapping]] = ...) -> None: ...

class TargetResult(_message.Message):
    __slots__ = ("session", "kind", "base", "kv_length", "tokens", "accepted", "finish_reason", "cached_tokens", "draft_has_context", "error", "logprobs")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    KV_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_HAS_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionKey
    kind: TargetResultKind
    base: int
    kv_length: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    accepted: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: _common_pb2.FinishReason
    cached_tokens: int
    draft_has_context: bool
    error: _common_pb2.Error
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionKey, _Mapping]] = ..., kind: _Optional[_Union[TargetResultKind, str]] = ..., base: _Optional[int] = ..., kv_length: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., accepted: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., cached_tokens: _Optional[int] = ..., draft_has_context: _Optional[bool] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("chosen", "top_ids", "top")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    chosen: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, chosen: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top: _Optional[_Iterable[float]] = ...) -> None: ...

class TargetReply(_message.Message):
    __slots__ = ("batch_id", "results", "timings", "available_pages")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_PAGES_FIELD_NUMBER: _ClassVar[int]
    batch_id: int
    results: _containers.RepeatedCompositeFieldContainer[TargetResult]
    timings: TargetTimings
    available_pages: int
    def __init__(self, batch_id: _Optional[int] = ..., results: _Optional[_Iterable[_Union[TargetResult, _Mapping]]] = ..., timings: _Optional[_Union[TargetTimings, _Mapping]] = ..., available_pages: _Optional[int] = ...) -> None: ...

class TargetTimings(_message.Message):
    __slots__ = ("queue_ns", "forward_ns", "commit_ns", "rows", "prefill_rows", "service_ns", "cold")
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_NS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ROWS_FIELD_NUMBER: _ClassVar[int]
    SERVICE_NS_FIELD_NUMBER: _ClassVar[int]
    COLD_FIELD_NUMBER: _ClassVar[int]
    queue_ns: int
    forward_ns: int
    commit_ns: int
    rows: int
    prefill_rows: int
    service_ns: int
    cold: bool
    def __init__(self, queue_ns: _Optional[int] = ..., forward_ns: _Optional[int] = ..., commit_ns: _Optional[int] = ..., rows: _Optional[int] = ..., prefill_rows: _Optional[int] = ..., service_ns: _Optional[int] = ..., cold: _Optional[bool] = ...) -> None: ...

class PeerIdentity(_message.Message):
    __slots__ = ("boot_id", "pid_namespace", "pid", "device", "instance", "device_ordinal")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PID_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ORDINAL_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    pid_namespace: str
    pid: int
    device: str
    instance: bytes
    device_ordinal: int
    def __init__(self, boot_id: _Optional[str] = ..., pid_namespace: _Optional[str] = ..., pid: _Optional[int] = ..., device: _Optional[str] = ..., instance: _Optional[bytes] = ..., device_ordinal: _Optional[int] = ...) -> None: ...

class ChannelRequest(_message.Message):
    __slots__ = ("attach", "probe", "ack", "recapture", "projection_part")
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    RECAPTURE_FIELD_NUMBER: _ClassVar[int]
    PROJECTION_PART_FIELD_NUMBER: _ClassVar[int]
    attach: Attach
    probe: Probe
    ack: Ack
    recapture: Recapture
    projection_part: ProjectionPart
    def __init__(self, attach: _Optional[_Union[Attach, _Mapping]] = ..., probe: _Optional[_Union[Probe, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., recapture: _Optional[_Union[Recapture, _Mapping]] = ..., projection_part: _Optional[_Union[ProjectionPart, _Mapping]] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("identity", "target_layer_ids", "normed_last_layer", "transports", "slots", "projection", "take_over")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    TARGET_LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    NORMED_LAST_LAYER_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    PROJECTION_FIELD_NUMBER: _ClassVar[int]
    TAKE_OVER_FIELD_NUMBER: _ClassVar[int]
    identity: PeerIdentity
    target_layer_ids: _containers.RepeatedScalarFieldContainer[int]
    normed_last_layer: bool
    transports: _containers.RepeatedScalarFieldContainer[str]
    slots: int
    projection: Projection
    take_over: bool
    def __init__(self, identity: _Optional[_Union[PeerIdentity, _Mapping]] = ..., target_layer_ids: _Optional[_Iterable[int]] = ..., normed_last_layer: _Optional[bool] = ..., transports: _Optional[_Iterable[str]] = ..., slots: _Optional[int] = ..., projection: _Optional[_Union[Projection, _Mapping]] = ..., take_over: _Optional[bool] = ...) -> None: ...

class Projection(_message.Message):
    __slots__ = ("width", "columns", "dtype", "eps")
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    EPS_FIELD_NUMBER: _ClassVar[int]
    width: int
    columns: int
    dtype: str
    eps: float
    def __init__(self, width: _Optional[int] = ..., columns: _Optional[int] = ..., dtype: _Optional[str] = ..., eps: _Optional[float] = ...) -> None: ...

class ProjectionPart(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ("opened", "nonce", "reason")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    opened: bool
    nonce: bytes
    reason: str
    def __init__(self, opened: _Optional[bool] = ..., nonce: _Optional[bytes] = ..., reason: _Optional[str] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("chunk_ids",)
    CHUNK_IDS_FIELD_NUMBER: _ClassVar[int]
    chunk_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, chunk_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Recapture(_message.Message):
    __slots__ = ("session", "first", "cause")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionKey
    first: int
    cause: str
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionKey, _Mapping]] = ..., first: _Optional[int] = ..., cause: _Optional[str] = ...) -> None: ...

class ChannelReply(_message.Message):
    __slots__ = ("offer", "attached", "chunks", "refused")
    OFFER_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    offer: Offer
    attached: Attached
    chunks: Chunks
    refused: Refused
    def __init__(self, offer: _Optional[_Union[Offer, _Mapping]] = ..., attached: _Optional[_Union[Attached, _Mapping]] = ..., chunks: _Optional[_Union[Chunks, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("transport", "location", "handle", "slots", "row_width", "dtype", "data_offset", "nonce_length")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    ROW_WIDTH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DATA_OFFSET_FIELD_NUMBER: _ClassVar[int]
    NONCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    transport: str
    location: str
    handle: bytes
    slots: int
    row_width: int
    dtype: str
    data_offset: int
    nonce_length: int
    def __init__(self, transport: _Optional[str] = ..., location: _Optional[str] = ..., handle: _Optional[bytes] = ..., slots: _Optional[int] = ..., row_width: _Optional[int] = ..., dtype: _Optional[str] = ..., data_offset: _Optional[int] = ..., nonce_length: _Optional[int] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("transport", "reason", "epoch", "slots", "row_width", "dtype")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    ROW_WIDTH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    transport: str
    reason: str
    epoch: bytes
    slots: int
    row_width: int
    dtype: str
    def __init__(self, transport: _Optional[str] = ..., reason: _Optional[str] = ..., epoch: _Optional[bytes] = ..., slots: _Optional[int] = ..., row_width: _Optional[int] = ..., dtype: _Optional[str] = ...) -> None: ...

class Chunks(_message.Message):
    __slots__ = ("chunks",)
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[Chunk]
    def __init__(self, chunks: _Optional[_Iterable[_Union[Chunk, _Mapping]]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("chunk_id", "session", "first_position", "count", "first_slot", "generation", "tokens", "anchor", "has_anchor", "data", "mark")
    CHUNK_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    FIRST_SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_FIELD_NUMBER: _ClassVar[int]
    HAS_ANCHOR_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    chunk_id: int
    session: _common_pb2.SessionKey
    first_position: int
    count: int
    first_slot: int
    generation: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    anchor: int
    has_anchor: bool
    data: bytes
    mark: int
    def __init__(self, chunk_id: _Optional[int] = ..., session: _Optional[_Union[_common_pb2.SessionKey, _Mapping]] = ..., first_position: _Optional[int] = ..., count: _Optional[int] = ..., first_slot: _Optional[int] = ..., generation: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., anchor: _Optional[int] = ..., has_anchor: _Optional[bool] = ..., data: _Optional[bytes] = ..., mark: _Optional[int] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: _common_pb2.Error
    def __init__(self, error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...
