from protos import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftResultKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAFT_RESULT_KIND_UNSPECIFIED: _ClassVar[DraftResultKind]
    DRAFT_RESULT_KIND_OPENED: _ClassVar[DraftResultKind]
    DRAFT_RESULT_KIND_PROPOSED: _ClassVar[DraftResultKind]
    DRAFT_RESULT_KIND_RELEASED: _ClassVar[DraftResultKind]
    DRAFT_RESULT_KIND_ERROR: _ClassVar[DraftResultKind]
DRAFT_RESULT_KIND_UNSPECIFIED: DraftResultKind
DRAFT_RESULT_KIND_OPENED: DraftResultKind
DRAFT_RESULT_KIND_PROPOSED: DraftResultKind
DRAFT_RESULT_KIND_RELEASED: DraftResultKind
DRAFT_RESULT_KIND_ERROR: DraftResultKind

class DraftInfo(_message.Message):
    __slots__ = ("drafter_id", "fingerprint", "target_fingerprint", "block_size", "mask_token_id", "target_layer_ids", "max_nodes", "draft_cost", "channel_transport", "channel_reason", "instance", "vocab_size", "attached", "dummy_weights", "simulated_acceptance", "footprint", "on_arrival")
    DRAFTER_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TARGET_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MASK_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_COST_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_REASON_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    DUMMY_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    SIMULATED_ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    FOOTPRINT_FIELD_NUMBER: _ClassVar[int]
    ON_ARRIVAL_FIELD_NUMBER: _ClassVar[int]
    drafter_id: str
    fingerprint: str
    target_fingerprint: str
    block_size: int
    mask_token_id: int
    target_layer_ids: _containers.RepeatedScalarFieldContainer[int]
    max_nodes: int
    draft_cost: _containers.RepeatedCompositeFieldContainer[_common_pb2.CostPoint]
    channel_transport: str
    channel_reason: str
    instance: bytes
    vocab_size: int
    attached: bool
    dummy_weights: bool
    simulated_acceptance: str
    footprint: _common_pb2.Footprint
    on_arrival: bool
    def __init__(self, drafter_id: _Optional[str] = ..., fingerprint: _Optional[str] = ..., target_fingerprint: _Optional[str] = ..., block_size: _Optional[int] = ..., mask_token_id: _Optional[int] = ..., target_layer_ids: _Optional[_Iterable[int]] = ..., max_nodes: _Optional[int] = ..., draft_cost: _Optional[_Iterable[_Union[_common_pb2.CostPoint, _Mapping]]] = ..., channel_transport: _Optional[str] = ..., channel_reason: _Optional[str] = ..., instance: _Optional[bytes] = ..., vocab_size: _Optional[int] = ..., attached: _Optional[bool] = ..., dummy_weights: _Optional[bool] = ..., simulated_acceptance: _Optional[str] = ..., footprint: _Optional[_Union[_common_pb2.Footprint, _Mapping]] = ..., on_arrival: _Optional[bool] = ...) -> None: ...

class DraftRequest(_message.Message):
    __slots__ = ("batch_id", "open", "propose", "release")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PROPOSE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    batch_id: int
    open: _containers.RepeatedCompositeFieldContainer[DraftOpen]
    propose: _containers.RepeatedCompositeFieldContainer[Propose]
    release: _containers.RepeatedCompositeFieldContainer[DraftRelease]
    def __init__(self, batch_id: _Optional[int] = ..., open: _Optional[_Iterable[_Union[DraftOpen, _Mapping]]] = ..., propose: _Optional[_Iterable[_Union[Propose, _Mapping]]] = ..., release: _Optional[_Iterable[_Union[DraftRelease, _Mapping]]] = ...) -> None: ...

class DraftOpen(_message.Message):
    __slots__ = ("session", "tokens", "prompt_length", "sampling", "cache_salt", "recapture", "kv_length")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    RECAPTURE_FIELD_NUMBER: _ClassVar[int]
    KV_LENGTH_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionKey
    tokens: _containers.RepeatedScalarFieldContainer[int]
    prompt_length: int
    sampling: _common_pb2.SamplingParams
    cache_salt: bytes
    recapture: bool
    kv_length: int
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionKey, _Mapping]] = ..., tokens: _Optional[_Iterable[int]] = ..., prompt_length: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., cache_salt: _Optional[bytes] = ..., recapture: _Optional[bool] = ..., kv_length: _Optional[int] = ...) -> None: ...

class Propose(_message.Message):
    __slots__ = ("session", "base", "anchor", "max_nodes", "max_depth", "on_arrival")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
    ON_ARRIVAL_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionKey
    base: int
    anchor: int
    max_nodes: int
    max_depth: int
    on_arrival: bool
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionKey, _Mapping]] = ..., base: _Optional[int] = ..., anchor: _Optional[int] = ..., max_nodes: _Optional[int] = ..., max_depth: _Optional[int] = ..., on_arrival: _Optional[bool] = ...) -> None: ...

class DraftRelease(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionKey
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionKey, _Mapping]] = ...) -> None: ...

class DraftResult(_message.Message):
    __slots__ = ("session", "kind", "base", "tree", "draft_prefix", "error", "anchor")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PREFIX_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionKey
    kind: DraftResultKind
    base: int
    tree: _common_pb2.DraftTree
    draft_prefix: int
    error: _common_pb2.Error
    anchor: int
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionKey, _Mapping]] = ..., kind: _Optional[_Union[DraftResultKind, str]] = ..., base: _Optional[int] = ..., tree: _Optional[_Union[_common_pb2.DraftTree, _Mapping]] = ..., draft_prefix: _Optional[int] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., anchor: _Optional[int] = ...) -> None: ...

class DraftReply(_message.Message):
    __slots__ = ("batch_id", "results", "timings")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    batch_id: int
    results: _containers.RepeatedCompositeFieldContainer[DraftResult]
    timings: DraftTimings
    def __init__(self, batch_id: _Optional[int] = ..., results: _Optional[_Iterable[_Union[DraftResult, _Mapping]]] = ..., timings: _Optional[_Union[DraftTimings, _Mapping]] = ...) -> None: ...

class DraftTimings(_message.Message):
    __slots__ = ("queue_ns", "channel_wait_ns", "append_ns", "forward_ns", "tree_ns", "service_ns")
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    APPEND_NS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    TREE_NS_FIELD_NUMBER: _ClassVar[int]
    SERVICE_NS_FIELD_NUMBER: _ClassVar[int]
    queue_ns: int
    channel_wait_ns: int
    append_ns: int
    forward_ns: int
    tree_ns: int
    service_ns: int
    def __init__(self, queue_ns: _Optional[int] = ..., channel_wait_ns: _Optional[int] = ..., append_ns: _Optional[int] = ..., forward_ns: _Optional[int] = ..., tree_ns: _Optional[int] = ..., service_ns: _Optional[int] = ...) -> None: ...
