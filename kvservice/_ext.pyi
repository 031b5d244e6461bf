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
    """Return the address of the first element, or None if the array is not C-contiguous."""

def populate(address: int, num_bytes: int) -> int:
    """Allocate the pages of memory that this process has mapped for writing, from a multiple of the page size on,
    without the interpreter lock. Returns 0 or errno: EINVAL if the kernel cannot do that. Some of the pages are
    allocated then."""

def num_threads() -> int: ...
def set_num_threads(count: Any) -> None: ...
def cpu_isa() -> str: ...

# Results of WireScanner.scan() other than the number of a counter.
WIRE_WITHIN_LIMITS: int
WIRE_TOO_MANY_RECORDS: int
WIRE_MALFORMED: int

class WireScanner:
    """Counts the contents of a serialized protobuf message before it is parsed. csrc/wire/scanner.h describes it.

    `messages[i]` are the fields of message type i as (number, kind, counter, message type): kind 0 is a varint, 1 and 2
    are fixed 64 and 32 bits, 3 is a string or bytes, 4 is a message. Counter and message type are -1 if there is none.
    `messages[0]` is the type of the outermost message. `limits[c]` is the limit of counter c.
    """

    def __init__(
        self, messages: list[list[tuple[int, int, int, int]]], limits: list[int], max_records: int
    ) -> None: ...
    def scan(self, data: bytes) -> int:
        """Return the number of a counter that exceeds its limit, or one of the constants above."""

def packed_fixed64(data: bytes, number: int) -> Any:
    """Return the elements of a packed field of 64-bit integers, int64[n], in a message that protobuf has serialized.
    Raises InvalidArgumentError for other bytes."""

def packed_fixed32(data: bytes, number: int) -> Any:
    """Return the elements of a packed field of 32-bit integers, int32[n], as `packed_fixed64`."""

def varint_field(number: int, numbers: Any) -> bytes:
    """Return a packed field of varints, which are int32[n] or int64[n], as a part of a message."""

def pack_fixed32(numbers: list[int]) -> bytes | None:
    """Return integers as the elements of a packed field of 32 bits. None if one is no int, or is out of range."""

# Lanes: Decode and Extend through shared memory. csrc/lane/ring.h defines the format.

# Size of a lane's memory, a multiple of 4096.
LANE_BYTES: int
# Upper bounds of the buckets of LaneServer.stats(), in seconds.
LANE_BUCKETS: tuple[float, ...]

class FinishedSteps:
    """The steps whose last layer a lane has written, of all sessions.

    A step is added before the call that wrote its last layer is completed for the client, and the descriptor is
    signalled after that.
    """

    def __init__(self) -> None:
        """Open the eventfd. Raises RuntimeError if the process has no file descriptors left."""
    @property
    def descriptor(self) -> int:
        """The eventfd. It becomes readable when there are finished steps, and is not readable after take()."""
    def take(self) -> list[tuple[int, int]]:
        """Return (number of the session, step id) of the steps that were finished since the previous call, each step
        once."""

class LaneSession:
    """The state of a session that its lanes use: live steps and regions. `number` identifies it in `finished`. The id
    of a step of which all layers are written is stored at kept_ids[id % n], int64[n]."""

    def __init__(self, num_layers: int, finished: FinishedSteps, number: int, kept_ids: Any = None) -> None: ...
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
        """Make a step available to the lanes. Step ids increase.

        `written` has one byte per layer, 1 if the layer is written: a lane sets it before it computes, and clears it if
        the computation fails. `slot_mapping` int64 `[num_tokens]`, `query_lens` and `context_lens` int32 `[n]`,
        `block_tables` int32 `[n, max_blocks]`, all C-contiguous. They are read in place and must not change until
        retire().

        `device_tables` is for executors on a device: the device addresses of the four arrays (the stream writes them
        before the next launch), and num_common_blocks and max_query_len as in `attention` of kvservice.ops.cuda. They
        are freed in stream order after retire().
        """
    def retire(self, step_id: int) -> None:
        """Withdraw a step. After it returns no lane uses the step or its arrays. Unknown ids are ignored."""
    def add_region(self, address: int, num_bytes: int, kind: str = "host") -> int:
        """Register memory. Places refer to it by the returned number, which is never reused."""
    def remove_region(self, number: int) -> None:
        """Unregister a region. After it returns no lane uses the region. Unknown numbers are ignored."""
    def set_draining(self) -> None:
        """Refuse calls of steps without a written layer with DRAINING from now on."""

class LaneExecutor: ...

# Upper bounds of the size classes of work on a pool in host memory, in bytes. One more class has no bound. Work runs in
# turns with work of its class, and beside that of other classes.
CPU_SIZE_CLASSES: tuple[int, ...]

class CpuLaneExecutor(LaneExecutor):
    """Executes the calls of any number of lanes, those of a size class one at a time. `pool` is as in `attention`."""

    def __init__(self, pool: Any, head_size: int, batch_invariant: bool) -> None: ...

class LaneServer:
    """The daemon's side of a lane, with its own thread. It formats `memory`, which has at least LANE_BYTES bytes.

    `on_fault` is called once, from the thread, with a message if a call fails and the caller is not the cause; the lane
    has ended then.
    """

    def __init__(
        self,
        memory: Any,
        session: LaneSession,
        executor: LaneExecutor,
        spin_us: float,
        on_fault: Callable[[str], object],
    ) -> None: ...
    def close(self) -> None:
        """Wait for running calls, end the lane and release the memory. A second call does nothing."""
    def stats(self) -> tuple[int, int, list[int], float]:
        """Return (calls, failed calls, calls per duration bucket, total seconds). There is one more bucket than
        LANE_BUCKETS, and the counts are not cumulative."""
    @property
    def closed(self) -> bool:
        """Whether the lane accepts no more calls, because it was closed or has ended by itself."""

class LaneClient:
    """The client's side of a lane, for one thread at a time. A LaneServer has formatted `memory`.

    A place is (region number, offset in bytes). Methods raise ConnectionLostError if the lane has ended.
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
    ) -> int:
        """Send a call and return its number. Raises ResourceExhaustedError if 64 calls are unanswered or unread."""
    def set_places(self, regions: Any, num_kv_heads: int, head_size: int, dtype: Any) -> None:
        """Set the parameters of submit_in_place: regions as (number, address, num_bytes), and the tensors' NumPy
        dtype."""

    def submit_in_place(
        self, step_id: int, num_tokens: int, layer: int, decode: bool, query: Any, key: Any, value: Any, out: Any
    ) -> int | None:
        """Submit a call without options whose tensors, of NumPy or torch, are all in regions. Returns None, and sends
        nothing, if the call is of another kind or invalid."""

    def wait(self, number: int, timeout_s: float) -> tuple[str, str, str] | None:
        """Wait for a call. Returns (reason, field, message) of its failure, three empty strings if it succeeded, or
        None after the timeout.

        Answers to earlier calls are dropped.
        """

# The block store. csrc/store/index.h describes its bookkeeping, csrc/store/layout.h its memory.
#
# Slots, offsets, versions and checksums are packed: 64-bit little-endian numbers, one after the other. Keys have 32
# bytes. A bitmap has one bit per key or block, the lowest bit of a byte first. Wrong arguments raise
# InvalidArgumentError; slots that no call returned, or that are in another state, raise RuntimeError.

class StoreStats:
    """Blocks of a namespace, or of all."""

    @property
    def num_blocks(self) -> int:
        """Blocks that can be found."""
    @property
    def num_leased(self) -> int:
        """Blocks with at least one lease, including condemned ones."""
    @property
    def num_reserved(self) -> int: ...
    @property
    def num_condemned(self) -> int:
        """Blocks that were removed while they were leased: their memory is freed with the last lease."""
    @property
    def num_slabs(self) -> int: ...
    @property
    def num_busy_slabs(self) -> int:
        """Slabs with blocks that are leased or reserved."""
    @property
    def used_bytes(self) -> int:
        """The size of all these blocks: found, reserved and condemned."""
    @property
    def num_evicted(self) -> int:
        """A counter: blocks that were evicted to make room."""
    @property
    def num_unoffered(self) -> int:
        """A counter: those of them that `StoreIndex.coldest` had not returned since their last use."""
    @property
    def num_offered(self) -> int:
        """Blocks without a lease that `StoreIndex.coldest` has returned since their last use."""

class StoreIndex:
    """The bookkeeping of the block store, for one thread.

    The memory has `num_bytes` bytes at `address` and consists of slabs of `slab_bytes` bytes, a multiple of 4096. A
    slab belongs to one namespace. The memory receives a record per block, and is never read. `seed` is a random 64-bit
    number: it seeds the hash of the keys, and the first version.

    `kept` is the address of `kept_bytes` bytes of private memory, zeroed at first, few of which are touched. It has all
    that a later process needs to go on. A process can be killed at any time: the next one finds each block as it was
    before or after the call that was interrupted.

    Within a call, the first key counts as the most recently used, because keys are chains of blocks: a block is of no
    use without those before it.
    """

    def __init__(self, address: int, num_bytes: int, slab_bytes: int, seed: int, kept: int) -> None:
        """Raises InvalidArgumentError naming `kept` if that is the memory of a store of another size."""
    @staticmethod
    def kept_bytes(num_bytes: int, slab_bytes: int) -> int: ...
    @property
    def generation(self) -> int:
        """The number of processes that had the kept memory before this one."""
    def recover(self, namespaces: list[tuple[int, int, int]]) -> tuple[bytes, bytes]:
        """Open the namespaces of the process before, (number, block_bytes, quota_bytes) each, with their blocks. Slabs
        of other namespaces are freed. Returns the slots reserved, and those condemned; each of the latter has one
        lease. There are no other leases. To be called once, before any other call."""
    def set_ready(self, num_bytes: int) -> None:
        """Say how much of the memory is there: all at first. The slabs behind it are not given to a namespace; those
        that have one stay. To be called after `recover`."""
    def open(self, block_bytes: int, quota_bytes: int) -> int:
        """Return the number of a new namespace. Numbers are never reused. It has at most
        quota_bytes // block_bytes blocks. Raises InvalidArgumentError if a block does not fit a slab."""
    def close(self, namespace: int) -> None:
        """Forget a namespace. Raises RuntimeError if it has blocks."""
    def set_quota(self, namespace: int, quota_bytes: int) -> None:
        """Change the quota of a namespace. One that has more blocks loses two for each one that it reserves, the least
        recently used first."""
    def geometry(self, namespace: int) -> tuple[int, int, int]:
        """Return (first_block, block_stride, blocks_per_slab), see OpenNamespaceResponse in store.proto."""
    def lookup(self, namespace: int, keys: bytes) -> tuple[int, bytes]:
        """Return the number of keys before the first one that is missing, and a bitmap of the keys found. Changes
        nothing."""
    def needed(self, namespace: int, keys: bytes) -> tuple[int, int]:
        """Return how many blocks with these keys, each once, are neither there nor being written, and how many that are
        there could be evicted. Changes nothing."""
    def acquire(
        self, namespace: int, keys: bytes, leading_only: bool, counted: bool = True
    ) -> tuple[bytes, bytes, bytes, bytes]:
        """Lease the blocks found, each key once more. Returns (bitmap of the keys, and for the blocks found: slots,
        offsets, versions). With `leading_only` it stops before the first key that is missing. `counted`: this is one
        more use, see `coldest`."""
    def coldest(
        self, namespace: int, most: int, newest_first: bool = False
    ) -> tuple[bytes, bytes, bytes, bytes, bytes]:
        """Lease up to `most` blocks that are next to be evicted, each once after its last use, the least recently used
        first. Their release is no use. Returns (slots, keys, offsets, checksums, uses); uses are counted since the
        block was stored: by `acquire`, `touch`, and `reserve` of a key that is there."""
    def lease(self, slots: bytes) -> None:
        """Lease committed or condemned blocks by slot, each once more."""
    def release(self, slots: bytes) -> None:
        """End leases: each slot as often as it was acquired or leased."""
    def reserve(self, namespace: int, keys: bytes) -> tuple[bytes, bytes, bytes]:
        """Reserve room for keys that are missing, and touch those that are there. Returns (a PutStatus per key, and for
        those reserved: slots, offsets)."""
    def commit(self, slots: bytes, checksums: bytes) -> None:
        """Publish reserved blocks."""
    def abort(self, slots: bytes) -> None:
        """Free reserved blocks."""
    def condemn(self, slots: bytes) -> None:
        """Remove the keys of reserved blocks. Their room counts as leased once more, so `release` frees it."""
    def touch(self, namespace: int, keys: bytes) -> int:
        """Make blocks the most recently used. Returns how many keys were found."""
    def remove(self, namespace: int, keys: bytes) -> int:
        """Remove blocks, but no reserved ones. Returns how many. A leased block is not found any more, and is freed
        with its last lease."""
    def clear(self, namespace: int, most: int) -> int:
        """Remove up to `most` blocks, the least recently used first, leased ones last. Returns how many."""
    def evict_blocks(self, namespace: int, most: int) -> int:
        """Evict up to `most` blocks, the least recently used first, and free their slots. Returns how many."""
    def empty_slabs(self, namespace: int, most_slabs: int, most_blocks: int) -> tuple[int, int]:
        """Evict the blocks of slabs that have no leased or reserved ones, the least recently used slab first, until
        `most_slabs` are free or `most_blocks` were evicted: with the last slab it can be more. Returns how many slabs
        and blocks."""
    def checksums(self, slots: bytes) -> bytes:
        """Return the checksums with which blocks were committed, 0 for reserved ones."""
    def places(self, slots: bytes) -> tuple[bytes, bytes]:
        """Return the keys and the offsets of blocks."""
    def record_removed(self, enabled: bool) -> None:
        """Start or stop to record the keys that are evicted or removed. Forgets those recorded."""
    def take_removed(self) -> list[tuple[int, bytes]]:
        """Return (namespace, keys) evicted or removed since the last call, in their order."""
    def stats(self, namespace: int) -> StoreStats: ...
    def totals(self) -> StoreStats:
        """Return the sums over all namespaces. `num_evicted` includes closed ones."""
    @property
    def num_slabs(self) -> int: ...
    @property
    def num_free_slabs(self) -> int: ...
    def check(self, most: int) -> bool:
        """Check the consistency of the next slabs, until `most` slots are checked, at least one slab. Returns whether
        the last slab was among them; then the next call starts with the first. Raises RuntimeError with what is
        wrong."""

class StoreMirror:
    """The blocks of a namespace in the mapped memory of a store, found and leased without the daemon. For leases the
    memory must be mapped for writing. Offsets and versions are packed uint64. Threads may share it. Raises
    InvalidArgumentError for offsets that are not of a block; keys have 32 bytes each."""

    def __init__(
        self,
        address: int,
        num_bytes: int,
        slab_bytes: int,
        first_block: int,
        block_stride: int,
        blocks_per_slab: int,
        namespace: int,
    ) -> None: ...
    def refresh(self, most: int) -> int:
        """Look for new blocks in the next slabs, until that were `most` records or all. Returns how many blocks are
        known."""
    def find(self, keys: bytes, leading_only: bool) -> tuple[bytes, bytes, bytes]:
        """Return (bitmap of the keys, and for the blocks found: offsets, versions). With `leading_only` it stops before
        the first key that is missing. Blocks that have come since the last look may be missing."""
    def lease(self, keys: bytes, leading_only: bool) -> tuple[bytes, bytes, bytes]:
        """The same, and lease the blocks. They stay until they are released, or were not renewed for 10 seconds."""
    def renew(self, offsets: bytes, versions: bytes) -> bool:
        """Renew a lease of each block. Returns whether all have lasted."""
    def release(self, offsets: bytes, versions: bytes) -> None:
        """End a lease of each block that is still there."""
    def take_changes(self) -> tuple[bytes, bytes, bool]:
        """Return the keys of blocks that have gone, and of those that have come, as far as `refresh` has seen it since
        the last call, and whether those that have come are all there are. That is so at the first call, and after a
        million changes: then nothing is known of what has gone. What has come is there; a key in both went first."""

def store_copy_in(
    memory: int,
    offsets: bytes,
    block_bytes: int,
    source: int,
    places: bytes,
    piece_bytes: bytes,
    num_threads: int,
) -> bytes:
    """Copy blocks into the store and return their checksums.

    `memory` and `source` are addresses. `offsets` are those of the blocks in the store. A block consists of pieces of
    `piece_bytes` bytes each, which sum up to `block_bytes`; piece p of block i is at source + places[i][p]. The caller
    guarantees that all addresses are valid. Up to `num_threads` threads copy, without the interpreter lock. Several
    threads may call it at a time.
    """

def store_copy_out(
    memory: int,
    offsets: bytes,
    block_bytes: int,
    target: int,
    places: bytes,
    piece_bytes: bytes,
    checksums: bytes,
    num_threads: int,
) -> bytes:
    """Copy blocks out of the store, like store_copy_in. Returns a bitmap of the blocks whose checksum is the expected
    one. If `checksums` is empty, nothing is verified, and all bits are 1."""

def store_checksums(memory: int, offsets: bytes, block_bytes: int, num_threads: int) -> bytes:
    """Return the checksums of blocks in the store, as csrc/store/checksum.h defines them."""

def store_versions(memory: int, slab_bytes: int, first_block: int, block_stride: int, offsets: bytes) -> bytes:
    """Return the current versions of blocks of a namespace, read from the records in the memory after everything that
    the caller has read before. 0 if the slab of a block belongs to a namespace with another geometry now."""

# Block tables int32[num_rows, width]. rows, starts and counts are int64[n]. csrc/blocks/tables.h describes them.

def slot_mapping(tables: Any, rows: Any, starts: Any, counts: Any, shift: int) -> Any:
    """Return the slots int64[sum(counts)] of the token positions starts[i], ..., starts[i] + counts[i] - 1 of each row.
    The block size is 1 << shift. Raises InvalidArgumentError for positions outside the tables."""

def shared_entries(tables: Any, rows: Any, starts: Any, counts: Any, ref_count: Any, indexed: Any) -> Any:
    """Return which of the table entries starts[i], ..., starts[i] + counts[i] - 1 of each row, concatenated, have a
    block with ref_count int32[num_blocks] above 1 or with indexed bool[num_blocks]: int64[m], ascending."""

def rows_of(rows: dict[int, int], ids: Any) -> Any:
    """Return the rows of these ids int64[n], int64[n]. None if an id is not in `rows`, or two have the same row."""

def first_negative(numbers: Any) -> int:
    """Return the index of the first negative one of numbers int32[n], -1 if there is none."""

def add_references(ref_count: Any, blocks: Any) -> tuple[Any, int]:
    """Add a reference to each of `blocks` int64[n], as often as it occurs, in ref_count int32[num_blocks]. Returns (the
    blocks int64[m] that had no reference, how many got their second one)."""

def drop_references(ref_count: Any, blocks: Any) -> tuple[Any, int]:
    """Drop a reference of each of `blocks` int64[n], as often as it occurs, in ref_count int32[num_blocks]. Returns
    (the blocks int64[m] that have none any more, how many are not shared any more). Raises InvalidArgumentError
    before anything changes."""

def distinct_blocks(blocks: Any) -> tuple[Any, Any, Any]:
    """Return (the distinct ones of `blocks` int64[n], ascending: int64[m]; the index of each block among them int64[n];
    how often each occurs int64[m]), as np.unique does."""

class StepTables:
    """What steps read and write of a pool: tables int32[num_rows, width], states int64[num_rows, m], ref_count
    int32[num_blocks], indexed bool[num_blocks] and token_ids int32[num_blocks, block_size], to which it refers. The
    first columns of a state are length, computed tokens, blocks, newest step, and whether the sequence is swapped out.
    A sequence has at most max_length tokens. rows int64[n] are distinct. Raises InvalidArgumentError before anything
    changes."""

    def __init__(
        self, tables: Any, states: Any, ref_count: Any, indexed: Any, token_ids: Any, max_length: int
    ) -> None: ...
    def plan_decode(
        self, rows: Any, tokens: Any, expected: Any = None, states: Any = None
    ) -> tuple[Any, Any, Any, Any] | None:
        """Plan one of tokens int32[n] for each row, with the expected lengths int64[n], or None. `states` int64[n, m]
        replaces the states of the rows. Returns (lengths afterwards int64[n]; the same int32[n]; slots int64[n]; the
        sequences int64[f] that need a new block, whose slot is the offset in it, or None). Returns None if the
        arguments have other types or lengths, a token is negative, a length is not as expected, a sequence is swapped
        out, another token of it is not computed, it has max_length tokens, or its last block is shared or indexed."""

    def append(self, rows: Any, slots: Any, tokens: Any, fresh: Any, blocks: Any) -> None:
        """Append blocks int64[f] to the tables of the sequences rows[fresh], add them to their slots int64[n], and
        store tokens int32[n] in the slots. fresh None: there are no blocks to append."""

    def start(self, rows: Any, lengths: Any, step_id: int) -> list[int]:
        """Make a step the newest one of sequences, and lengths int64[n] their lengths. Returns the distinct steps that
        it replaces."""

    def create(self, rows: list[int], found: list[Any], tokens: list[Any], blocks: Any) -> None:
        """Write the tables of new sequences: their prefix-cache hits found[i] int64[f], then the next of the new
        `blocks` int64[b]; the tokens past the hits, of tokens[i] int32[n], to the new blocks; and the first columns of
        their states. They need exactly these blocks."""

    def fork(self, parent: int, child: int) -> int:
        """Give the row `child` the table of the row `parent` and the first columns of its state, which steps use, and
        each block in the table one reference more. Returns how many of the blocks got their second one."""

    def full_blocks(self, rows: Any, context_lens: Any) -> tuple[list[int], list[int], Any, list[int]] | None:
        """Return the blocks that become full when the sequences have context_lens int32[n] computed tokens, one
        sequence after another: (their rows, their entries in the tables, their ids int64[f], the ids of the blocks
        before them, or -1). None if there are none."""

def match_hashes(index: dict[bytes, int], hashes: list[bytes], limit: int, ref_count: Any) -> tuple[Any, int]:
    """Look up at most `limit` of these hashes in `index`, up to the first miss. Returns (blocks int64[n], how many of
    them have a ref_count int32[num_blocks] above 0)."""

class DiskStats:
    """Counts since the start, but for `num_values`, `used_bytes`, `broken_bytes`, `capacity_bytes`, `reads_fail` and
    `writes_fail`."""

    @property
    def state(self) -> str:
        """opening, open, failed or closed"""
    @property
    def direct(self) -> bool:
        """False if the file system has no O_DIRECT: then everything goes through the page cache."""
    @property
    def capacity_bytes(self) -> int: ...
    @property
    def num_values(self) -> int: ...
    @property
    def used_bytes(self) -> int: ...
    @property
    def broken_bytes(self) -> int:
        """Room whose last write failed. It is tried again later."""
    @property
    def evicted(self) -> int: ...
    @property
    def removed(self) -> int: ...
    @property
    def corrupt(self) -> int:
        """Values read with a wrong checksum. They are removed."""
    @property
    def read_values(self) -> int: ...
    @property
    def read_bytes(self) -> int: ...
    @property
    def written_values(self) -> int: ...
    @property
    def written_bytes(self) -> int: ...
    @property
    def refused(self) -> int:
        """Values that were not stored, because all slots were in use or none is large enough."""
    @property
    def dropped(self) -> int:
        """Values that were neither read nor written, because the queue was full."""
    @property
    def errors(self) -> int:
        """Reads and writes that failed."""
    @property
    def reads_fail(self) -> bool:
        """Whether so many reads in a row failed that it is the disk."""
    @property
    def writes_fail(self) -> bool:
        """The same of writes. Then each put writes one value at most, as a probe; the others are refused."""

class DiskFiles:
    """Values in files in a directory, for one event loop. csrc/disk/format.h specifies the files.

    A value is named by a space, which is a digest of 16 bytes and a size, and by a key. Threads read and write values
    directly from and to `memory`, an address. `offsets` are packed 64-bit numbers, and so are checksums, which
    csrc/store/checksum.h defines. Arguments that are wrong raise InvalidArgumentError.

    The files are opened by the threads. Until then nothing is found, and nothing is stored.
    """

    def __init__(
        self,
        directory: str,
        capacity_bytes: int,
        slab_bytes: int,
        memory: int,
        memory_bytes: int,
        num_threads: int,
        max_queued: int,
        seed: int,
    ) -> None:
        """A value has at most `slab_bytes` bytes. Files that exist keep their size of slabs. `max_queued` is a limit
        of values in the queue of reads, and of those in the queue of writes. `seed` is a random 64-bit number. Raises
        RuntimeError if the directory is in use, or has files of another format."""
    @property
    def event_fd(self) -> int:
        """It is readable when operations have completed, and when the files are open or have failed to open."""
    @property
    def problem(self) -> str:
        """Why the files could not be opened."""
    def lookup(self, digest: bytes, value_bytes: int, keys: bytes) -> bytes:
        """Return a byte per key: 1 if the value is stored."""
    def get(self, digest: bytes, value_bytes: int, keys: bytes, offsets: bytes) -> int:
        """Begin to read values into memory. Returns the number of the operation."""
    def put(self, digest: bytes, value_bytes: int, keys: bytes, offsets: bytes, checksums: bytes) -> int:
        """Begin to write values from memory. Returns the number of the operation."""
    def remove(self, digest: bytes, value_bytes: int, keys: bytes) -> int:
        """Remove values at once. The operation completes when they would not come back after a crash."""
    def clear(self, digest: bytes, value_bytes: int) -> int:
        """Remove all values of a space, likewise."""
    def cancel(self, operation: int) -> None:
        """Let an operation complete as soon as none of its values is being read or written."""
    def take_completed(self) -> list[tuple[int, bytes, bytes, int, bool]]:
        """Return the operations that have completed since the last call: (operation, a byte per key: 1 if it was read
        or is stored, the checksums of values read, how many values were removed, whether a remove or clear is not on
        disk)."""
    def stats(self) -> DiskStats: ...
    def close(self) -> None:
        """Complete all operations, the ones in progress after their end, flush the files and unlock the directory."""
