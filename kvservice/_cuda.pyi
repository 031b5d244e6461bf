"""The CUDA extension. Pointers are integers, streams are handles, dtypes are the numbers of `DType` in csrc/pool.h
(0 float32, 1 float16, 2 bfloat16, 3 float8_e4m3fn, 4 float8_e5m2). It imports without a driver."""

# The same as there, but this module's own: a server here takes a session and an executor from here. Which module's the
# client is does not matter.
from kvservice._ext import (
    LANE_BUCKETS as LANE_BUCKETS,
)
from kvservice._ext import (
    LANE_BYTES as LANE_BYTES,
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
    """0 where there is no driver."""

def device_facts(device: int) -> dict[str, int | str]:
    """name, major, minor, num_multiprocessors, l2_bytes, total_bytes."""

def memory_info(device: int) -> tuple[int, int]:
    """(free, total) bytes."""

def set_device(device: int) -> None:
    """Of the calling thread."""

class DeviceMemory:
    """Made with the virtual-memory API, mapped for as long as it lives."""

    def __init__(self, device: int, num_bytes: int) -> None: ...
    @property
    def pointer(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def export_fd(self) -> int: ...
    def close(self) -> None: ...

class ImportedMemory:
    """Memory that another process made as DeviceMemory and handed over as a descriptor, which stays the caller's;
    `num_bytes` is all of it. There until it is closed, also when the other process is gone. InvalidArgumentError, field
    fd or num_bytes. Not writable is how this process sees it: a kernel that writes nevertheless takes the device from
    the process, but whoever has the descriptor can map it for writing."""

    def __init__(self, device: int, fd: int, num_bytes: int, writable: bool) -> None: ...
    @property
    def pointer(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def close(self) -> None: ...

class IpcAllocation:
    """Memory to share by handle: whole granules of 2 MiB, and nothing else in them."""

    def __init__(self, device: int, num_bytes: int) -> None: ...
    @property
    def pointer(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def handle(self) -> bytes:
        """A cudaIpcMemHandle_t, 64 bytes."""

    def close(self) -> None: ...

class IpcMemory:
    """The first `byte_size` bytes of another process's allocation, there until it is closed, also when the other
    process has freed it or is gone. CudaError where the driver does not open the handle (201: it is of this process);
    InvalidArgumentError, field raw_handle, where it is none or what it names is open already, field byte_size where the
    allocation has not that many bytes. Closing waits for what is launched on the device."""

    def __init__(self, device: int, raw_handle: bytes, byte_size: int) -> None: ...
    @property
    def pointer(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def close(self) -> None: ...

class HostRegistration:
    """Page-locks host memory that somebody else owns."""

    def __init__(self, address: int, num_bytes: int) -> None: ...
    def close(self) -> None: ...

class Stream:
    def __init__(self, device: int, high_priority: bool = False) -> None: ...
    @property
    def handle(self) -> int: ...
    def synchronize(self) -> None: ...
    def idle(self) -> bool:
        """Whether all that was launched on it is done."""

    def wait(self, event: Event) -> None: ...

class Event:
    """Without timing unless asked for. `synchronize` lets go of the interpreter lock."""

    def __init__(self, device: int, timing: bool = False) -> None: ...
    def record(self, stream: int) -> None: ...
    def wait(self, stream: int) -> None:
        """Makes what is launched on the stream from now on wait for what was recorded last."""

    def synchronize(self) -> None: ...
    def done(self) -> bool: ...
    def elapsed_ms(self, start: Event) -> float: ...

def synchronize_stream(stream: int) -> None:
    """Waits for what was launched on it, without the interpreter lock."""

class IpcEvent(Event):
    """One that other processes can open. If the process that recorded it is killed before the stream gets there it is
    never done, and a stream that waits for it stands for ever: wait only for those of a process that is trusted."""

    def __init__(self, device: int) -> None: ...
    @property
    def native(self) -> int:
        """The cudaEvent_t."""
    @property
    def handle(self) -> bytes:
        """A cudaIpcEventHandle_t, 64 bytes."""

def open_ipc_event(device: int, handle: bytes) -> IpcEvent:
    """CudaError where the driver does not open the handle; InvalidArgumentError, field handle, where it is none."""

def allocate_async(num_bytes: int, stream: int) -> int: ...
def free_async(pointer: int, stream: int) -> None: ...
def copy_async(dst: int, src: int, num_bytes: int, stream: int) -> None:
    """Either way; the direction follows from the pointers."""

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
    """One call's arguments; attributes not set are off. `kernel`: auto, reference, decode, extend or cascade."""

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
    """`src_ids`, `dst_ids`: NumPy int32 arrays, in host memory."""

class CudaLaneExecutor(LaneExecutor):
    """Computes calls of any number of lanes on a stream, each lane's thread waiting for its own, unless they are by
    event.

    Regions are memory of the device (also of another process, IpcMemory), or host memory that is page-locked
    (HostRegistration); a call that names any other is refused. `dtype` is the tensors'. `scales` is the address of
    float32[2, num_layers, num_kv_heads] on the device, of keys, then of values, or 0. `workspace_bytes`, at least
    64 KiB, is its own to begin with, and grows. A call is waited for awake for `spin_us`, below a second, then asleep.
    Stream, pool and scales outlive it. RESOURCE_EXHAUSTED is a reason, too, for which calls fail.
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
