from google.rpc import status_pb2 as _status_pb2
from kvservice.v1 import blocks_pb2 as _blocks_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BatchPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BATCH_POLICY_UNSPECIFIED: _ClassVar[BatchPolicy]
    BATCH_POLICY_CHUNKED: _ClassVar[BatchPolicy]
    BATCH_POLICY_PREFILL_FIRST: _ClassVar[BatchPolicy]

class QueueOrder(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    QUEUE_ORDER_UNSPECIFIED: _ClassVar[QueueOrder]
    QUEUE_ORDER_FCFS: _ClassVar[QueueOrder]
    QUEUE_ORDER_PRIORITY: _ClassVar[QueueOrder]

class PreemptionMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PREEMPTION_MODE_UNSPECIFIED: _ClassVar[PreemptionMode]
    PREEMPTION_MODE_RECOMPUTE: _ClassVar[PreemptionMode]
    PREEMPTION_MODE_SWAP: _ClassVar[PreemptionMode]
    PREEMPTION_MODE_AUTO: _ClassVar[PreemptionMode]

class RequestPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_PHASE_UNSPECIFIED: _ClassVar[RequestPhase]
    REQUEST_PHASE_WAITING: _ClassVar[RequestPhase]
    REQUEST_PHASE_PREFILLING: _ClassVar[RequestPhase]
    REQUEST_PHASE_DECODING: _ClassVar[RequestPhase]
    REQUEST_PHASE_SWAPPED: _ClassVar[RequestPhase]
BATCH_POLICY_UNSPECIFIED: BatchPolicy
BATCH_POLICY_CHUNKED: BatchPolicy
BATCH_POLICY_PREFILL_FIRST: BatchPolicy
QUEUE_ORDER_UNSPECIFIED: QueueOrder
QUEUE_ORDER_FCFS: QueueOrder
QUEUE_ORDER_PRIORITY: QueueOrder
PREEMPTION_MODE_UNSPECIFIED: PreemptionMode
PREEMPTION_MODE_RECOMPUTE: PreemptionMode
PREEMPTION_MODE_SWAP: PreemptionMode
PREEMPTION_MODE_AUTO: PreemptionMode
REQUEST_PHASE_UNSPECIFIED: RequestPhase
REQUEST_PHASE_WAITING: RequestPhase
REQUEST_PHASE_PREFILLING: RequestPhase
REQUEST_PHASE_DECODING: RequestPhase
REQUEST_PHASE_SWAPPED: RequestPhase

class OpenSchedulerRequest(_message.Message):
    __slots__ = ("session_token", "request_id", "max_step_tokens", "max_running", "policy", "order", "preemption", "lookahead", "long_prefill_tokens", "max_long_prefills", "max_requests", "reserve_steps", "max_stalled_fraction", "size_delay_steps", "max_size_delay_steps", "delay_factor", "share_prefixes", "swap_block_s", "compute_token_s", "weight")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    PREEMPTION_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_FIELD_NUMBER: _ClassVar[int]
    LONG_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_LONG_PREFILLS_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RESERVE_STEPS_FIELD_NUMBER: _ClassVar[int]
    MAX_STALLED_FRACTION_FIELD_NUMBER: _ClassVar[int]
    SIZE_DELAY_STEPS_FIELD_NUMBER: _ClassVar[int]
    MAX_SIZE_DELAY_STEPS_FIELD_NUMBER: _ClassVar[int]
    DELAY_FACTOR_FIELD_NUMBER: _ClassVar[int]
    SHARE_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    SWAP_BLOCK_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    request_id: int
    max_step_tokens: int
    max_running: int
    policy: BatchPolicy
    order: QueueOrder
    preemption: PreemptionMode
    lookahead: int
    long_prefill_tokens: int
    max_long_prefills: int
    max_requests: int
    reserve_steps: int
    max_stalled_fraction: float
    size_delay_steps: float
    max_size_delay_steps: float
    delay_factor: float
    share_prefixes: bool
    swap_block_s: float
    compute_token_s: float
    weight: float
    def __init__(self, session_token: _Optional[bytes] = ..., request_id: _Optional[int] = ..., max_step_tokens: _Optional[int] = ..., max_running: _Optional[int] = ..., policy: _Optional[_Union[BatchPolicy, str]] = ..., order: _Optional[_Union[QueueOrder, str]] = ..., preemption: _Optional[_Union[PreemptionMode, str]] = ..., lookahead: _Optional[int] = ..., long_prefill_tokens: _Optional[int] = ..., max_long_prefills: _Optional[int] = ..., max_requests: _Optional[int] = ..., reserve_steps: _Optional[int] = ..., max_stalled_fraction: _Optional[float] = ..., size_delay_steps: _Optional[float] = ..., max_size_delay_steps: _Optional[float] = ..., delay_factor: _Optional[float] = ..., share_prefixes: bool = ..., swap_block_s: _Optional[float] = ..., compute_token_s: _Optional[float] = ..., weight: _Optional[float] = ...) -> None: ...

class OpenSchedulerResponse(_message.Message):
    __slots__ = ("max_step_tokens", "max_running", "lookahead", "max_requests", "existed")
    MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    EXISTED_FIELD_NUMBER: _ClassVar[int]
    max_step_tokens: int
    max_running: int
    lookahead: int
    max_requests: int
    existed: bool
    def __init__(self, max_step_tokens: _Optional[int] = ..., max_running: _Optional[int] = ..., lookahead: _Optional[int] = ..., max_requests: _Optional[int] = ..., existed: bool = ...) -> None: ...

class ScheduledRequest(_message.Message):
    __slots__ = ("request_id", "token_ids", "max_tokens", "priority", "extra_keys", "width", "stop_lengths", "beams")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    EXTRA_KEYS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    STOP_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    BEAMS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    priority: int
    extra_keys: _containers.RepeatedCompositeFieldContainer[_blocks_pb2.ExtraKey]
    width: int
    stop_lengths: _containers.RepeatedScalarFieldContainer[int]
    beams: bool
    def __init__(self, request_id: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., priority: _Optional[int] = ..., extra_keys: _Optional[_Iterable[_Union[_blocks_pb2.ExtraKey, _Mapping]]] = ..., width: _Optional[int] = ..., stop_lengths: _Optional[_Iterable[int]] = ..., beams: bool = ...) -> None: ...

class AddRequestsRequest(_message.Message):
    __slots__ = ("session_token", "request_id", "requests")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    request_id: int
    requests: _containers.RepeatedCompositeFieldContainer[ScheduledRequest]
    def __init__(self, session_token: _Optional[bytes] = ..., request_id: _Optional[int] = ..., requests: _Optional[_Iterable[_Union[ScheduledRequest, _Mapping]]] = ...) -> None: ...

class AddRequestsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AbortRequestsRequest(_message.Message):
    __slots__ = ("session_token", "request_id", "request_ids")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    request_id: int
    request_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_token: _Optional[bytes] = ..., request_id: _Optional[int] = ..., request_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class AbortRequestsResponse(_message.Message):
    __slots__ = ("finished_ids",)
    FINISHED_IDS_FIELD_NUMBER: _ClassVar[int]
    finished_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, finished_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class StepReport(_message.Message):
    __slots__ = ("batch", "token_ids", "num_tokens", "parent_ids", "finished_ids", "proposals", "num_proposed")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENT_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_IDS_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROPOSED_FIELD_NUMBER: _ClassVar[int]
    batch: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    parent_ids: _containers.RepeatedScalarFieldContainer[int]
    finished_ids: _containers.RepeatedScalarFieldContainer[int]
    proposals: _containers.RepeatedScalarFieldContainer[int]
    num_proposed: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, batch: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., parent_ids: _Optional[_Iterable[int]] = ..., finished_ids: _Optional[_Iterable[int]] = ..., proposals: _Optional[_Iterable[int]] = ..., num_proposed: _Optional[_Iterable[int]] = ...) -> None: ...

class ScheduleRequest(_message.Message):
    __slots__ = ("session_token", "request_id", "reports", "max_step_tokens", "max_running", "ahead", "retry")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    request_id: int
    reports: _containers.RepeatedCompositeFieldContainer[StepReport]
    max_step_tokens: int
    max_running: int
    ahead: bool
    retry: bool
    def __init__(self, session_token: _Optional[bytes] = ..., request_id: _Optional[int] = ..., reports: _Optional[_Iterable[_Union[StepReport, _Mapping]]] = ..., max_step_tokens: _Optional[int] = ..., max_running: _Optional[int] = ..., ahead: bool = ..., retry: bool = ...) -> None: ...

class ScheduleResponse(_message.Message):
    __slots__ = ("batch", "step", "sequence_ids", "num_decodes", "sampled_ids", "sampled_rows", "finished_ids", "preempted_ids", "preempted_tokens", "preempted_swapped", "num_stalled", "num_waiting", "num_running", "num_swapped", "failed")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODES_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_ROWS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_IDS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_IDS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_SWAPPED_FIELD_NUMBER: _ClassVar[int]
    NUM_STALLED_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPPED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    batch: int
    step: _blocks_pb2.StepResponse
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    num_decodes: int
    sampled_ids: _containers.RepeatedScalarFieldContainer[int]
    sampled_rows: _containers.RepeatedScalarFieldContainer[int]
    finished_ids: _containers.RepeatedScalarFieldContainer[int]
    preempted_ids: _containers.RepeatedScalarFieldContainer[int]
    preempted_tokens: _containers.RepeatedScalarFieldContainer[int]
    preempted_swapped: _containers.RepeatedScalarFieldContainer[bool]
    num_stalled: int
    num_waiting: int
    num_running: int
    num_swapped: int
    failed: _containers.RepeatedCompositeFieldContainer[FailedRequest]
    def __init__(self, batch: _Optional[int] = ..., step: _Optional[_Union[_blocks_pb2.StepResponse, _Mapping]] = ..., sequence_ids: _Optional[_Iterable[int]] = ..., num_decodes: _Optional[int] = ..., sampled_ids: _Optional[_Iterable[int]] = ..., sampled_rows: _Optional[_Iterable[int]] = ..., finished_ids: _Optional[_Iterable[int]] = ..., preempted_ids: _Optional[_Iterable[int]] = ..., preempted_tokens: _Optional[_Iterable[int]] = ..., preempted_swapped: _Optional[_Iterable[bool]] = ..., num_stalled: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_running: _Optional[int] = ..., num_swapped: _Optional[int] = ..., failed: _Optional[_Iterable[_Union[FailedRequest, _Mapping]]] = ...) -> None: ...

class FailedRequest(_message.Message):
    __slots__ = ("request_id", "error")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    error: _status_pb2.Status
    def __init__(self, request_id: _Optional[int] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class DescribeRequestsRequest(_message.Message):
    __slots__ = ("session_token", "request_ids", "first", "return_token_ids")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    RETURN_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    request_ids: _containers.RepeatedScalarFieldContainer[int]
    first: int
    return_token_ids: bool
    def __init__(self, session_token: _Optional[bytes] = ..., request_ids: _Optional[_Iterable[int]] = ..., first: _Optional[int] = ..., return_token_ids: bool = ...) -> None: ...

class RequestSequence(_message.Message):
    __slots__ = ("sequence_id", "finished", "num_generated", "length", "token_ids")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATED_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    finished: bool
    num_generated: int
    length: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence_id: _Optional[int] = ..., finished: bool = ..., num_generated: _Optional[int] = ..., length: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class RequestDescription(_message.Message):
    __slots__ = ("request_id", "phase", "sequences", "extra_keys")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    EXTRA_KEYS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    phase: RequestPhase
    sequences: _containers.RepeatedCompositeFieldContainer[RequestSequence]
    extra_keys: _containers.RepeatedCompositeFieldContainer[_blocks_pb2.ExtraKey]
    def __init__(self, request_id: _Optional[int] = ..., phase: _Optional[_Union[RequestPhase, str]] = ..., sequences: _Optional[_Iterable[_Union[RequestSequence, _Mapping]]] = ..., extra_keys: _Optional[_Iterable[_Union[_blocks_pb2.ExtraKey, _Mapping]]] = ...) -> None: ...

class DescribeRequestsResponse(_message.Message):
    __slots__ = ("requests", "num_requests", "unreported_batches")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    UNREPORTED_BATCHES_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestDescription]
    num_requests: int
    unreported_batches: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestDescription, _Mapping]]] = ..., num_requests: _Optional[int] = ..., unreported_batches: _Optional[_Iterable[int]] = ...) -> None: ...
