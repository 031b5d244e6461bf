from kvservice.v1 import store_pb2 as _store_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetSnapshotRequest(_message.Message):
    __slots__ = ("max_sessions", "max_sequences", "search")
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    SEARCH_FIELD_NUMBER: _ClassVar[int]
    max_sessions: int
    max_sequences: int
    search: str
    def __init__(self, max_sessions: _Optional[int] = ..., max_sequences: _Optional[int] = ..., search: _Optional[str] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("time_s", "uptime_s", "pool", "rates", "calls", "sessions", "sequences", "num_sessions", "num_sequences", "store", "scheduling", "restart", "tiers", "spill", "saved", "transfers", "tenants")
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    RATES_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    SCHEDULING_FIELD_NUMBER: _ClassVar[int]
    RESTART_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    SPILL_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    time_s: float
    uptime_s: float
    pool: PoolSnapshot
    rates: Rates
    calls: _containers.RepeatedCompositeFieldContainer[CallSnapshot]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionSnapshot]
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceSnapshot]
    num_sessions: int
    num_sequences: int
    store: StoreSnapshot
    scheduling: SchedulingSnapshot
    restart: RestartSnapshot
    tiers: _containers.RepeatedCompositeFieldContainer[TierSnapshot]
    spill: SpillSnapshot
    saved: SavedSnapshot
    transfers: TransferSnapshot
    tenants: _containers.RepeatedCompositeFieldContainer[TenantSnapshot]
    def __init__(self, time_s: _Optional[float] = ..., uptime_s: _Optional[float] = ..., pool: _Optional[_Union[PoolSnapshot, _Mapping]] = ..., rates: _Optional[_Union[Rates, _Mapping]] = ..., calls: _Optional[_Iterable[_Union[CallSnapshot, _Mapping]]] = ..., sessions: _Optional[_Iterable[_Union[SessionSnapshot, _Mapping]]] = ..., sequences: _Optional[_Iterable[_Union[SequenceSnapshot, _Mapping]]] = ..., num_sessions: _Optional[int] = ..., num_sequences: _Optional[int] = ..., store: _Optional[_Union[StoreSnapshot, _Mapping]] = ..., scheduling: _Optional[_Union[SchedulingSnapshot, _Mapping]] = ..., restart: _Optional[_Union[RestartSnapshot, _Mapping]] = ..., tiers: _Optional[_Iterable[_Union[TierSnapshot, _Mapping]]] = ..., spill: _Optional[_Union[SpillSnapshot, _Mapping]] = ..., saved: _Optional[_Union[SavedSnapshot, _Mapping]] = ..., transfers: _Optional[_Union[TransferSnapshot, _Mapping]] = ..., tenants: _Optional[_Iterable[_Union[TenantSnapshot, _Mapping]]] = ...) -> None: ...

class SpillSnapshot(_message.Message):
    __slots__ = ("saved_blocks", "saved_bytes", "refused", "torn", "dropped", "loaded_blocks", "loaded_bytes", "hit_tokens", "slower", "crowded", "corrupt", "queued", "loading", "down_bytes_per_s", "up_bytes_per_s")
    SAVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SAVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    TORN_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    LOADED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SLOWER_FIELD_NUMBER: _ClassVar[int]
    CROWDED_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    DOWN_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    UP_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    saved_blocks: int
    saved_bytes: int
    refused: int
    torn: int
    dropped: int
    loaded_blocks: int
    loaded_bytes: int
    hit_tokens: int
    slower: int
    crowded: int
    corrupt: int
    queued: int
    loading: int
    down_bytes_per_s: float
    up_bytes_per_s: float
    def __init__(self, saved_blocks: _Optional[int] = ..., saved_bytes: _Optional[int] = ..., refused: _Optional[int] = ..., torn: _Optional[int] = ..., dropped: _Optional[int] = ..., loaded_blocks: _Optional[int] = ..., loaded_bytes: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., slower: _Optional[int] = ..., crowded: _Optional[int] = ..., corrupt: _Optional[int] = ..., queued: _Optional[int] = ..., loading: _Optional[int] = ..., down_bytes_per_s: _Optional[float] = ..., up_bytes_per_s: _Optional[float] = ...) -> None: ...

class TransferSnapshot(_message.Message):
    __slots__ = ("engines", "regions", "region_bytes", "running_in", "running_out", "done_in", "done_out", "failed_in", "failed_out", "bytes_in", "bytes_out", "engine_failures", "damaged_blocks", "fallbacks", "fallback_bytes", "in_bytes_per_s", "out_bytes_per_s", "fallback_bytes_per_s", "p50_s", "p99_s")
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    REGION_BYTES_FIELD_NUMBER: _ClassVar[int]
    RUNNING_IN_FIELD_NUMBER: _ClassVar[int]
    RUNNING_OUT_FIELD_NUMBER: _ClassVar[int]
    DONE_IN_FIELD_NUMBER: _ClassVar[int]
    DONE_OUT_FIELD_NUMBER: _ClassVar[int]
    FAILED_IN_FIELD_NUMBER: _ClassVar[int]
    FAILED_OUT_FIELD_NUMBER: _ClassVar[int]
    BYTES_IN_FIELD_NUMBER: _ClassVar[int]
    BYTES_OUT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FAILURES_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_BYTES_FIELD_NUMBER: _ClassVar[int]
    IN_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    OUT_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    P50_S_FIELD_NUMBER: _ClassVar[int]
    P99_S_FIELD_NUMBER: _ClassVar[int]
    engines: int
    regions: int
    region_bytes: int
    running_in: int
    running_out: int
    done_in: int
    done_out: int
    failed_in: int
    failed_out: int
    bytes_in: int
    bytes_out: int
    engine_failures: int
    damaged_blocks: int
    fallbacks: int
    fallback_bytes: int
    in_bytes_per_s: float
    out_bytes_per_s: float
    fallback_bytes_per_s: float
    p50_s: float
    p99_s: float
    def __init__(self, engines: _Optional[int] = ..., regions: _Optional[int] = ..., region_bytes: _Optional[int] = ..., running_in: _Optional[int] = ..., running_out: _Optional[int] = ..., done_in: _Optional[int] = ..., done_out: _Optional[int] = ..., failed_in: _Optional[int] = ..., failed_out: _Optional[int] = ..., bytes_in: _Optional[int] = ..., bytes_out: _Optional[int] = ..., engine_failures: _Optional[int] = ..., damaged_blocks: _Optional[int] = ..., fallbacks: _Optional[int] = ..., fallback_bytes: _Optional[int] = ..., in_bytes_per_s: _Optional[float] = ..., out_bytes_per_s: _Optional[float] = ..., fallback_bytes_per_s: _Optional[float] = ..., p50_s: _Optional[float] = ..., p99_s: _Optional[float] = ...) -> None: ...

class SavedSnapshot(_message.Message):
    __slots__ = ("num_sessions", "used_bytes", "capacity_bytes", "saved", "restored", "expired", "damaged", "errors")
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    num_sessions: int
    used_bytes: int
    capacity_bytes: int
    saved: int
    restored: int
    expired: int
    damaged: int
    errors: int
    def __init__(self, num_sessions: _Optional[int] = ..., used_bytes: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., saved: _Optional[int] = ..., restored: _Optional[int] = ..., expired: _Optional[int] = ..., damaged: _Optional[int] = ..., errors: _Optional[int] = ...) -> None: ...

class RestartSnapshot(_message.Message):
    __slots__ = ("outcome", "is_kept", "ended", "reason", "num_restarts", "down_s", "take_over_s", "kept", "lost", "summary")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    IS_KEPT_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    DOWN_S_FIELD_NUMBER: _ClassVar[int]
    TAKE_OVER_S_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    outcome: str
    is_kept: bool
    ended: str
    reason: str
    num_restarts: int
    down_s: float
    take_over_s: float
    kept: KeptSnapshot
    lost: LostSnapshot
    summary: str
    def __init__(self, outcome: _Optional[str] = ..., is_kept: bool = ..., ended: _Optional[str] = ..., reason: _Optional[str] = ..., num_restarts: _Optional[int] = ..., down_s: _Optional[float] = ..., take_over_s: _Optional[float] = ..., kept: _Optional[_Union[KeptSnapshot, _Mapping]] = ..., lost: _Optional[_Union[LostSnapshot, _Mapping]] = ..., summary: _Optional[str] = ...) -> None: ...

class KeptSnapshot(_message.Message):
    __slots__ = ("sessions", "sequences", "steps", "cached_blocks", "pins", "store_blocks")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    STORE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    sessions: int
    sequences: int
    steps: int
    cached_blocks: int
    pins: int
    store_blocks: int
    def __init__(self, sessions: _Optional[int] = ..., sequences: _Optional[int] = ..., steps: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., pins: _Optional[int] = ..., store_blocks: _Optional[int] = ...) -> None: ...

class LostSnapshot(_message.Message):
    __slots__ = ("sequences", "steps", "schedulers")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULERS_FIELD_NUMBER: _ClassVar[int]
    sequences: int
    steps: int
    schedulers: int
    def __init__(self, sequences: _Optional[int] = ..., steps: _Optional[int] = ..., schedulers: _Optional[int] = ...) -> None: ...

class StoreSnapshot(_message.Message):
    __slots__ = ("num_bytes", "used_bytes", "blocks", "leased", "reserved", "hits", "misses", "quarantined", "up_bytes_per_s", "down_bytes_per_s", "hit_share", "evicted_misses", "not_whole_misses", "other_namespace_misses", "never_stored_misses", "ready_bytes")
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    UP_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    DOWN_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    HIT_SHARE_FIELD_NUMBER: _ClassVar[int]
    EVICTED_MISSES_FIELD_NUMBER: _ClassVar[int]
    NOT_WHOLE_MISSES_FIELD_NUMBER: _ClassVar[int]
    OTHER_NAMESPACE_MISSES_FIELD_NUMBER: _ClassVar[int]
    NEVER_STORED_MISSES_FIELD_NUMBER: _ClassVar[int]
    READY_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    used_bytes: int
    blocks: int
    leased: int
    reserved: int
    hits: int
    misses: int
    quarantined: int
    up_bytes_per_s: float
    down_bytes_per_s: float
    hit_share: float
    evicted_misses: int
    not_whole_misses: int
    other_namespace_misses: int
    never_stored_misses: int
    ready_bytes: int
    def __init__(self, num_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., leased: _Optional[int] = ..., reserved: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., quarantined: _Optional[int] = ..., up_bytes_per_s: _Optional[float] = ..., down_bytes_per_s: _Optional[float] = ..., hit_share: _Optional[float] = ..., evicted_misses: _Optional[int] = ..., not_whole_misses: _Optional[int] = ..., other_namespace_misses: _Optional[int] = ..., never_stored_misses: _Optional[int] = ..., ready_bytes: _Optional[int] = ...) -> None: ...

class TierSnapshot(_message.Message):
    __slots__ = ("name", "state", "num_values", "used_bytes", "capacity_bytes", "hits", "misses", "read_values", "read_bytes", "read_s", "written_values", "written_bytes", "write_s", "evicted", "removed", "refused", "dropped", "corrupt", "errors", "suspensions", "latency_s", "read_bytes_per_s", "write_bytes_per_s", "up_bytes_per_s", "down_bytes_per_s", "hit_share")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_VALUES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    READ_VALUES_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    READ_S_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_VALUES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITE_S_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    SUSPENSIONS_FIELD_NUMBER: _ClassVar[int]
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    WRITE_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    UP_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    DOWN_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    HIT_SHARE_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: str
    num_values: int
    used_bytes: int
    capacity_bytes: int
    hits: int
    misses: int
    read_values: int
    read_bytes: int
    read_s: float
    written_values: int
    written_bytes: int
    write_s: float
    evicted: int
    removed: int
    refused: int
    dropped: int
    corrupt: int
    errors: int
    suspensions: int
    latency_s: float
    read_bytes_per_s: float
    write_bytes_per_s: float
    up_bytes_per_s: float
    down_bytes_per_s: float
    hit_share: float
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., num_values: _Optional[int] = ..., used_bytes: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., read_values: _Optional[int] = ..., read_bytes: _Optional[int] = ..., read_s: _Optional[float] = ..., written_values: _Optional[int] = ..., written_bytes: _Optional[int] = ..., write_s: _Optional[float] = ..., evicted: _Optional[int] = ..., removed: _Optional[int] = ..., refused: _Optional[int] = ..., dropped: _Optional[int] = ..., corrupt: _Optional[int] = ..., errors: _Optional[int] = ..., suspensions: _Optional[int] = ..., latency_s: _Optional[float] = ..., read_bytes_per_s: _Optional[float] = ..., write_bytes_per_s: _Optional[float] = ..., up_bytes_per_s: _Optional[float] = ..., down_bytes_per_s: _Optional[float] = ..., hit_share: _Optional[float] = ...) -> None: ...

class SchedulingSnapshot(_message.Message):
    __slots__ = ("totals", "generated_tokens_per_s", "finished_per_s", "preemptions_per_s", "recomputed_tokens_per_s", "accepted_share", "first_token_p50_s", "first_token_p99_s", "between_tokens_p50_s", "between_tokens_p99_s")
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    FINISHED_PER_S_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_PER_S_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_SHARE_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_P50_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_P99_S_FIELD_NUMBER: _ClassVar[int]
    BETWEEN_TOKENS_P50_S_FIELD_NUMBER: _ClassVar[int]
    BETWEEN_TOKENS_P99_S_FIELD_NUMBER: _ClassVar[int]
    totals: SchedulerSnapshot
    generated_tokens_per_s: float
    finished_per_s: float
    preemptions_per_s: float
    recomputed_tokens_per_s: float
    accepted_share: float
    first_token_p50_s: float
    first_token_p99_s: float
    between_tokens_p50_s: float
    between_tokens_p99_s: float
    def __init__(self, totals: _Optional[_Union[SchedulerSnapshot, _Mapping]] = ..., generated_tokens_per_s: _Optional[float] = ..., finished_per_s: _Optional[float] = ..., preemptions_per_s: _Optional[float] = ..., recomputed_tokens_per_s: _Optional[float] = ..., accepted_share: _Optional[float] = ..., first_token_p50_s: _Optional[float] = ..., first_token_p99_s: _Optional[float] = ..., between_tokens_p50_s: _Optional[float] = ..., between_tokens_p99_s: _Optional[float] = ...) -> None: ...

class SchedulerSnapshot(_message.Message):
    __slots__ = ("waiting", "running", "swapped", "stalled", "steps", "added", "finished", "aborted", "refused", "recompute_preemptions", "swap_preemptions", "stalls", "prompt_tokens", "cached_tokens", "recomputed_tokens", "generated_tokens", "proposed_tokens", "accepted_tokens")
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_FIELD_NUMBER: _ClassVar[int]
    STALLED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    SWAP_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    STALLS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    waiting: int
    running: int
    swapped: int
    stalled: int
    steps: int
    added: int
    finished: int
    aborted: int
    refused: int
    recompute_preemptions: int
    swap_preemptions: int
    stalls: int
    prompt_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    generated_tokens: int
    proposed_tokens: int
    accepted_tokens: int
    def __init__(self, waiting: _Optional[int] = ..., running: _Optional[int] = ..., swapped: _Optional[int] = ..., stalled: _Optional[int] = ..., steps: _Optional[int] = ..., added: _Optional[int] = ..., finished: _Optional[int] = ..., aborted: _Optional[int] = ..., refused: _Optional[int] = ..., recompute_preemptions: _Optional[int] = ..., swap_preemptions: _Optional[int] = ..., stalls: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., proposed_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ...) -> None: ...

class PoolSnapshot(_message.Message):
    __slots__ = ("num_blocks", "free_blocks", "active_blocks", "shared_blocks", "cached_blocks", "pinned_blocks", "num_swap_blocks", "used_swap_blocks", "sequences", "swapped_sequences", "tokens", "sessions", "lanes", "regions", "region_bytes", "draining", "quarantined_blocks")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SHARED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_SWAP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    REGION_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    free_blocks: int
    active_blocks: int
    shared_blocks: int
    cached_blocks: int
    pinned_blocks: int
    num_swap_blocks: int
    used_swap_blocks: int
    sequences: int
    swapped_sequences: int
    tokens: int
    sessions: int
    lanes: int
    regions: int
    region_bytes: int
    draining: bool
    quarantined_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., active_blocks: _Optional[int] = ..., shared_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., pinned_blocks: _Optional[int] = ..., num_swap_blocks: _Optional[int] = ..., used_swap_blocks: _Optional[int] = ..., sequences: _Optional[int] = ..., swapped_sequences: _Optional[int] = ..., tokens: _Optional[int] = ..., sessions: _Optional[int] = ..., lanes: _Optional[int] = ..., regions: _Optional[int] = ..., region_bytes: _Optional[int] = ..., draining: bool = ..., quarantined_blocks: _Optional[int] = ...) -> None: ...

class Rates(_message.Message):
    __slots__ = ("window_s", "computed_tokens", "query_tokens", "hit_tokens", "hit_share", "evicted_blocks", "cow_copies", "swapped_out_bytes", "swapped_in_bytes", "out_of_blocks", "calls", "errors", "lane_calls")
    WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_SHARE_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COW_COPIES_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_OUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_IN_BYTES_FIELD_NUMBER: _ClassVar[int]
    OUT_OF_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    LANE_CALLS_FIELD_NUMBER: _ClassVar[int]
    window_s: float
    computed_tokens: float
    query_tokens: float
    hit_tokens: float
    hit_share: float
    evicted_blocks: float
    cow_copies: float
    swapped_out_bytes: float
    swapped_in_bytes: float
    out_of_blocks: float
    calls: float
    errors: float
    lane_calls: float
    def __init__(self, window_s: _Optional[float] = ..., computed_tokens: _Optional[float] = ..., query_tokens: _Optional[float] = ..., hit_tokens: _Optional[float] = ..., hit_share: _Optional[float] = ..., evicted_blocks: _Optional[float] = ..., cow_copies: _Optional[float] = ..., swapped_out_bytes: _Optional[float] = ..., swapped_in_bytes: _Optional[float] = ..., out_of_blocks: _Optional[float] = ..., calls: _Optional[float] = ..., errors: _Optional[float] = ..., lane_calls: _Optional[float] = ...) -> None: ...

class CallSnapshot(_message.Message):
    __slots__ = ("method", "calls", "errors", "calls_per_s", "p50_s", "p99_s")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    CALLS_PER_S_FIELD_NUMBER: _ClassVar[int]
    P50_S_FIELD_NUMBER: _ClassVar[int]
    P99_S_FIELD_NUMBER: _ClassVar[int]
    method: str
    calls: int
    errors: int
    calls_per_s: float
    p50_s: float
    p99_s: float
    def __init__(self, method: _Optional[str] = ..., calls: _Optional[int] = ..., errors: _Optional[int] = ..., calls_per_s: _Optional[float] = ..., p50_s: _Optional[float] = ..., p99_s: _Optional[float] = ...) -> None: ...

class SessionSnapshot(_message.Message):
    __slots__ = ("session_id", "name", "tenant", "attached", "age_s", "sequences", "swapped_sequences", "tokens", "blocks", "regions", "region_bytes", "lane", "computed_tokens", "query_tokens", "hit_tokens", "scheduler", "engine")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    REGION_BYTES_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    name: str
    tenant: str
    attached: bool
    age_s: float
    sequences: int
    swapped_sequences: int
    tokens: int
    blocks: int
    regions: int
    region_bytes: int
    lane: bool
    computed_tokens: int
    query_tokens: int
    hit_tokens: int
    scheduler: SchedulerSnapshot
    engine: _store_pb2.EngineReport
    def __init__(self, session_id: _Optional[int] = ..., name: _Optional[str] = ..., tenant: _Optional[str] = ..., attached: bool = ..., age_s: _Optional[float] = ..., sequences: _Optional[int] = ..., swapped_sequences: _Optional[int] = ..., tokens: _Optional[int] = ..., blocks: _Optional[int] = ..., regions: _Optional[int] = ..., region_bytes: _Optional[int] = ..., lane: bool = ..., computed_tokens: _Optional[int] = ..., query_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., scheduler: _Optional[_Union[SchedulerSnapshot, _Mapping]] = ..., engine: _Optional[_Union[_store_pb2.EngineReport, _Mapping]] = ...) -> None: ...

class SequenceSnapshot(_message.Message):
    __slots__ = ("session_id", "session_name", "sequence_id", "length", "computed", "blocks", "swapped")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_NAME_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    session_name: str
    sequence_id: int
    length: int
    computed: int
    blocks: int
    swapped: bool
    def __init__(self, session_id: _Optional[int] = ..., session_name: _Optional[str] = ..., sequence_id: _Optional[int] = ..., length: _Optional[int] = ..., computed: _Optional[int] = ..., blocks: _Optional[int] = ..., swapped: bool = ...) -> None: ...

class TenantSnapshot(_message.Message):
    __slots__ = ("name", "quotas")
    NAME_FIELD_NUMBER: _ClassVar[int]
    QUOTAS_FIELD_NUMBER: _ClassVar[int]
    name: str
    quotas: _containers.RepeatedCompositeFieldContainer[QuotaSnapshot]
    def __init__(self, name: _Optional[str] = ..., quotas: _Optional[_Iterable[_Union[QuotaSnapshot, _Mapping]]] = ...) -> None: ...

class QuotaSnapshot(_message.Message):
    __slots__ = ("limit", "used", "value", "refused")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    limit: str
    used: float
    value: float
    refused: int
    def __init__(self, limit: _Optional[str] = ..., used: _Optional[float] = ..., value: _Optional[float] = ..., refused: _Optional[int] = ...) -> None: ...
