from collections.abc import Callable
from typing import Any

def write_kv(pool: Any, layer: Any, slot_mapping: Any, key: Any, value: Any) -> None: ...
def read_kv(pool: Any, layer: Any, slots: Any, head_size: Any) -> tuple[Any, Any]: ...
def attention(
    pool: Any,
    layer: Any,
    query: Any,
    query_lens: Any,
    block_tables: Any,
    context_lens: Any,
    scale: Any,
    sliding_window: Any,
    logits_soft_cap: Any,
    alibi_slopes: Any,
    out: Any,
    return_lse: bool,
) -> Any: ...
def copy_blocks(src_pool: Any, dst_pool: Any, src_ids: Any, dst_ids: Any) -> None: ...
def address_of(array: Any) -> int | None:
    """Of the first element; None for an array with gaps, or not in row-major order."""

def num_threads() -> int: ...
def set_num_threads(count: Any) -> None: ...
def cpu_isa() -> str: ...

# What WireScanner.scan() says besides the number of a counter.
WIRE_WITHIN_LIMITS: int
WIRE_TOO_MANY_RECORDS: int
WIRE_MALFORMED: int

class WireScanner:
    """Counts what a serialized protobuf message holds, before anything is built from it. csrc/wire/scanner.h says how.

    `messages[i]` are the fields of message type i as (number, kind, counter, message type): kind 0 is a varint, 1 and 2
    are fixed 64 and 32 bits, 3 is a string or bytes, 4 is a message. Counter and message type are -1 where there is
    none. `messages[0]` is the type of the whole. `limits[c]` is the most that counter c may reach.
    """

    def __init__(
        self, messages: list[list[tuple[int, int, int, int]]], limits: list[int], max_records: int
    ) -> None: ...
    def scan(self, data: bytes) -> int:
        """The number of a counter that is above its limit, or one of the constants above."""

# Lanes: Decode and Extend through shared memory. csrc/lane/ring.h is the format.

# Of a lane's memory, a multiple of 4096.
LANE_BYTES: int
# Upper bounds of LaneServer.stats(), in seconds.
LANE_BUCKETS: tuple[float, ...]

class LaneSession:
    """What the lanes of a session know of it: its live steps and its regions."""

    def __init__(self, num_layers: int) -> None: ...
    def publish(
        self,
        step_id: int,
        written: bytearray,
        slot_mapping: Any,
        query_lens: Any,
        context_lens: Any,
        block_tables: Any,
        device_tables: tuple[int, int, int, int, int, int] | None = None,
    ) -> None:
        """Lanes may compute the layers of this step from now on. Step ids rise.

        `written` has a byte for each layer, 1 where it is written: a lane sets it before it computes and clears it if
        that fails. `slot_mapping` int64 `[num_tokens]`, `query_lens` and `context_lens` int32 `[n]`, `block_tables`
        int32 `[n, max_blocks]`, all C-contiguous; they are read in place and must not change until retire().

        `device_tables` is for executors that compute on a device: where the four arrays are there (addresses, which the
        stream has written when it gets to the next launch), num_common_blocks and max_query_len as of `attention` in
        kvservice.ops.cuda. After retire() they are freed in the order of the stream.
        """
    def retire(self, step_id: int) -> None:
        """When it returns, no lane uses the step or its arrays, and none will, but for the device tables: calls by
        event may still read those, in the order of their stream. Unknown ids: nothing."""
    def take_finished(self) -> list[int]:
        """Steps whose last layer was written through a lane, since the last time. Each step once."""
    def add_region(self, address: int, num_bytes: int, kind: str = "host") -> int:
        """Places may name these bytes from now on, by the number that is returned and never used again."""
    def remove_region(self, number: int) -> None:
        """When it returns, no lane uses the region, and none will, but for calls by event that are not done: who takes
        the memory away waits for them. Unknown numbers: nothing."""
    def set_draining(self) -> None:
        """From now on a step of which no layer is written is refused with DRAINING."""

class LaneExecutor: ...

class CpuLaneExecutor(LaneExecutor):
    """Computes calls of any number of lanes, in turn. `pool` as for `attention`."""

    def __init__(self, pool: Any, head_size: int, batch_invariant: bool) -> None: ...

class LaneServer:
    """The daemon's side of a lane, with a thread of its own. It formats `memory`, of at least LANE_BYTES.

    `on_fault` is called with a text, once and from the thread, when a call fails for no fault of the caller; the lane
    has ended then. `event`, an IpcEvent of the executor's device, is for calls with `by_event`, which are refused with
    INVALID_ARGUMENT, field completion, where there is none.
    """

    def __init__(
        self,
        memory: Any,
        session: LaneSession,
        executor: LaneExecutor,
        spin_us: float,
        on_fault: Callable[[str], object],
        event: Any = None,
    ) -> None: ...
    def close(self) -> None:
        """Ends the lane after the calls that run, waits for them and lets go of the memory. A second time: nothing."""
    def stats(self) -> tuple[int, int, list[int], float]:
        """Calls, those that failed, calls by duration (one more than LANE_BUCKETS, not cumulative), seconds in all."""
    @property
    def closed(self) -> bool:
        """It takes no more calls: it was closed, or has ended by itself."""
    @property
    def event_handle(self) -> bytes:
        """Its event's, for other processes to open; b"" where it has none."""

class LaneClient:
    """The client's side of a lane, for one thread at a time. `memory` is what a LaneServer has formatted.

    A place is (region number, offset in bytes). Errors: ConnectionLostError when the lane has ended.
    """

    def __init__(self, memory: Any, spin_us: float) -> None: ...
    def submit(
        self,
        step_id: int,
        layer: int,
        decode: bool,
        num_heads: int,
        query: tuple[int, int],
        key: tuple[int, int],
        value: tuple[int, int],
        output: tuple[int, int],
        lse: tuple[int, int] | None,
        *,
        scale: float = 0.0,
        sliding_window: int = 0,
        logits_soft_cap: float = 0.0,
        alibi_slopes: tuple[int, int] | None = None,
        block_sparse: tuple[int, int, int, int, int] | None = None,
        by_event: bool = False,
    ) -> int:
        """Sends a call and returns its number. ResourceExhaustedError when 64 calls are unanswered or unread.

        `by_event`: the answer comes when the call is launched, and the lane's event is recorded behind the call. A
        stream that is made to wait for the event after the answer goes on when the call is done. Till then the call
        reads and writes its tensors.
        """
    def set_places(self, regions: Any, num_kv_heads: int, head_size: int, dtype: Any) -> None:
        """What submit_in_place looks for: regions as (number, address, num_bytes), and the tensors' NumPy dtype."""

    def submit_in_place(
        self, step_id: int, num_tokens: int, layer: int, decode: bool, query: Any, key: Any, value: Any, out: Any
    ) -> int | None:
        """submit() for a call without options whose tensors, NumPy's or torch's, all lie in regions; None, and nothing
        is sent, if it is not of that kind, or wrong."""

    def wait(self, number: int, timeout_s: float) -> tuple[str, str, str] | None:
        """(reason, field, message) of the call's failure, three empty texts if it succeeded, None if the time is over.

        Answers to earlier calls are dropped.
        """
