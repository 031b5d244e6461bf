"""The CUDA extension. Pointers are integers, streams are handles, dtypes are the numbers of `DType` in csrc/pool.h
(0 float32, 1 float16, 2 bfloat16, 3 float8_e4m3fn, 4 float8_e5m2). It can be imported without a driver."""

# This module has its own copies of these classes: its servers need sessions and executors of this module. Clients of
# either module work with both.
from kvservice._ext import (
    LANE_BUCKETS as LANE_BUCKETS,
)
from kvservice._ext import (
    LANE_BYTES as LANE_BYTES,
)
from kvservice._ext import (
    FinishedSteps as FinishedSteps,
)
from kvservice._ext import (
    LaneClient as LaneClient,
)
from kvservice._ext import (
    LaneExecutor as LaneExecutor,
)
from kvservice._ext import (
    LaneServer as LaneServer,
)
from kvservice._ext import (
    LaneSession as LaneSession,
)

class CudaError(RuntimeError):
    """A CUDA call failed; `code` is its cudaError_t."""

    code: int

def device_count() -> int:
    """Return the number of devices, 0 without a driver."""

def device_facts(device: int) -> dict[str, int | str]:
    """Return name, major, minor, num_multiprocessors, l2_bytes and total_bytes of a device."""

def memory_info(device: int) -> tuple[int, int]:
    """Return (free, total) bytes of device memory."""

def set_device(device: int) -> None:
    """Set the current device of the calling thread."""

class DeviceMemory:
    """Device memory from CUDA's virtual-memory API, mapped until it is closed."""

    def __init__(self, device: int, num_bytes: int) -> None: ...
    @property
    def pointer(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def export_fd(self) -> int: ...
    def close(self) -> None: ...

class ImportedMemory:
    """DeviceMemory of another process, imported from a descriptor, which the caller keeps. `num_bytes` is its full
    size. It stays valid until it is closed, even after the other process ends. Raises InvalidArgumentError with field
    fd or num_bytes. Without `writable` only this mapping is read-only, and a kernel that writes to it makes the device
    unusable for the process; a holder of the descriptor can always map it for writing."""

    def __init__(self, device: int, fd: int, num_bytes: int, writable: bool) -> None: ...
    @property
    def pointer(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def close(self) -> None: ...

class IpcAllocation:
    """Device memory for sharing by CUDA IPC handle. It occupies whole granules of 2 MiB, which contain nothing else."""

    def __init__(self, device: int, num_bytes: int) -> None: ...
    @property
    def pointer(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def handle(self) -> bytes:
        """The cudaIpcMemHandle_t, 64 bytes."""

    def close(self) -> None: ...

class IpcMemory:
    """The first `byte_size` bytes of another process's allocation. They stay valid until closed, even if the other
    process frees them or ends. Raises CudaError if the driver does not open the handle (201: the handle is of this
    process), and InvalidArgumentError with field raw_handle if the handle is malformed or its memory is already open,
    or with field byte_size if the allocation is smaller. `close` synchronizes the device."""

    def __init__(self, device: int, raw_handle: bytes, byte_size: int) -> None: ...
    @property
    def pointer(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def close(self) -> None: ...

class HostRegistration:
    """Pins host memory that the caller owns. A mapping that is not writable needs `read_only`."""

    def __init__(self, address: int, num_bytes: int, read_only: bool = False) -> None: ...
    def close(self) -> None: ...

class Stream:
    def __init__(self, device: int, high_priority: bool = False) -> None: ...
    @property
    def handle(self) -> int: ...
    def synchronize(self) -> None: ...
    def idle(self) -> bool:
        """Return whether all work on the stream is complete."""

    def wait(self, event: Event) -> None: ...

class Event:
    """A CUDA event, without timing by default. `synchronize` releases the interpreter lock. It polls, or sleeps if the
    event is `blocking`."""

    def __init__(self, device: int, timing: bool = False, blocking: bool = False) -> None: ...
    def record(self, stream: int) -> None: ...
    def synchronize(self) -> None: ...
    def done(self) -> bool: ...
    def elapsed_ms(self, start: Event) -> float: ...

class StreamMark:
    """A mark stands for the work that is on a stream when it is made. That and `make_wait` take microseconds, unless a
    stream is full, and keep the interpreter lock: a thread that computes would return it only after the 5 ms of the
    switch interval."""

    def __init__(self, device: int, stream: int) -> None: ...
    def make_wait(self, stream: int) -> None:
        """Let what is put on another stream from now on wait for it."""

    def synchronize(self) -> None:
        """Wait for it, asleep and without the interpreter lock."""

def synchronize_stream(stream: int) -> None:
    """Wait for all work on a stream, without the interpreter lock."""

def allocate_async(num_bytes: int, stream: int) -> int: ...
def free_async(pointer: int, stream: int) -> None: ...
def copy_async(dst: int, src: int, num_bytes: int, stream: int) -> None:
    """Copy between host and device memory, in stream order. The pointers determine the direction."""

def fill_async(dst: int, byte: int, num_bytes: int, stream: int) -> None: ...
def write_kv(
    pool: int,
    pool_dtype: int,
    num_blocks: int,
    num_layers: int,
    num_kv_heads: int,
    head_size: int,
    block_size: int,
    layer: int,
    num_tokens: int,
    slot_mapping: int,
    key: int,
    value: int,
    dtype: int,
    k_scale: int,
    v_scale: int,
    stream: int,
) -> None: ...
def read_kv(
    pool: int,
    pool_dtype: int,
    num_blocks: int,
    num_layers: int,
    num_kv_heads: int,
    head_size: int,
    block_size: int,
    layer: int,
    num_tokens: int,
    slots: int,
    key: int,
    value: int,
    dtype: int,
    k_scale: int,
    v_scale: int,
    stream: int,
) -> None: ...

class Attention:
    """Arguments of one attention call. Attributes that are not set are off. `kernel` is auto, reference, decode, extend
    or cascade."""

    pool: int
    pool_dtype: int
    num_blocks: int
    num_layers: int
    num_kv_heads: int
    head_size: int
    block_size: int
    layer: int
    dtype: int
    num_tokens: int
    num_seqs: int
    num_heads: int
    max_blocks: int
    max_query_len: int
    num_common_blocks: int
    query: int
    query_lens: int
    block_tables: int
    context_lens: int
    alibi_slopes: int
    k_scale: int
    v_scale: int
    scale: float
    soft_cap: float
    sliding_window: int
    sparse: tuple[int, int, int, int, int]  # vert_stride, local_blocks, block_size, head_sliding_step, tp_rank
    out: int
    lse: int
    workspace: int
    workspace_bytes: int
    batch_invariant: bool
    kernel: str
    stream: int

    def __init__(self) -> None: ...
    def wanted_workspace_bytes(self) -> int: ...
    def launch(self) -> None: ...

def copy_blocks(
    src: int,
    dst: int,
    num_src_blocks: int,
    num_dst_blocks: int,
    block_bytes: int,
    src_ids: object,
    dst_ids: object,
    stream: int,
) -> None:
    """Copy blocks. `src_ids` and `dst_ids` are NumPy int32 arrays in host memory."""

def advance_tables(
    positions: int,
    growth: int,
    shift: int,
    block_tables: int,
    context_lens: int,
    slot_mapping: int,
    num_rows: int,
    max_blocks: int,
    block_size: int,
    stream: int,
) -> None:
    """Move the tables of a decode step on to the next token of each row: positions, growth and shift int64[num_rows],
    block_tables int32[num_rows, max_blocks], context_lens int32[num_rows], slot_mapping int64[num_rows]. The slot of a
    position outside the block tables is -1."""

class BlockStage:
    """Device memory of `num_bytes`, a multiple of 64 KiB, through which blocks pass on their way to and from pinned
    memory. All calls use the same `stream`, and have ended when it has reached what they have put there.

    `pieces` is the device address of int64[3, num_pieces]: piece p of block b starts at [0, p] + b * [1, p] and ends
    before byte [2, p] of the block. `addresses` uint64 and `block_ids` int64 are contiguous NumPy arrays of the same
    length. Everything is a multiple of 16 bytes; device memory is not checked."""

    def __init__(self, device: int, num_bytes: int) -> None: ...
    def load(
        self, pieces: int, num_pieces: int, block_bytes: int, addresses: object, block_ids: object, stream: int
    ) -> None:
        """Copy blocks from pinned memory, which may be read before the stream reaches this, to the device."""

    def save(
        self,
        pieces: int,
        num_pieces: int,
        block_bytes: int,
        addresses: object,
        block_ids: object,
        sums: int,
        checksums: int,
        stream: int,
    ) -> None:
        """The inverse of `load`, which waits until all but the last parts are copied. Also writes the checksums of the
        blocks (csrc/store/checksum.h) to `checksums`, the address of pinned uint64[num_copies]. `sums` is the address
        of scratch memory on the device for uint64[num_copies, 16]."""

    def synchronize(self) -> None:
        """Wait for all copies to and from pinned memory, also those of a call that has failed in the middle."""

class CudaLaneExecutor(LaneExecutor):
    """Executes the calls of any number of lanes on one stream. Each lane's thread waits for its own calls.

    Regions are device memory (including IpcMemory of another process) or pinned host memory (HostRegistration); calls
    with other regions are refused. `dtype` is the dtype of tensors. `scales` is the device address of
    float32[2, num_layers, num_kv_heads], first of keys, then of values, or 0. `workspace_bytes`, at least 64 KiB, is
    the initial size of its workspace, which grows on demand. It polls for the completion of a call for `spin_us`
    microseconds, below one second, then sleeps. Stream, pool and scales must outlive it. Calls can also fail with
    RESOURCE_EXHAUSTED.
    """

    def __init__(
        self,
        device: int,
        stream: int,
        pool: int,
        pool_dtype: int,
        num_blocks: int,
        num_layers: int,
        num_kv_heads: int,
        head_size: int,
        block_size: int,
        dtype: int,
        scales: int,
        batch_invariant: bool,
        workspace_bytes: int,
        spin_us: float,
    ) -> None: ...
