"""Lanes for a pool on a GPU. Each lane's thread launches its calls on the compute stream and waits for them."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from kvservice.blocks import StepPlan
from kvservice.config import ServeConfig
from kvservice.devices.arena import DeviceStepTables
from kvservice.devices.base import Array, FinishedSteps, Int64
from kvservice.devices.compute import Compute
from kvservice.devices.kernels import LANE_WORKSPACE_BYTES
from kvservice.errors import InvalidArgumentError, RegionNotOpenedError, ResourceExhaustedError
from kvservice.ops.cuda import DTYPE_NUMBERS
from kvservice.pool.sealed import SealedMemory

if TYPE_CHECKING:
    from kvservice import _cuda

# Microseconds for which a lane's thread polls for the completion of a call before it sleeps. A wake-up takes about 30.
LOOK_US = 1000.0


class CudaLaneSession:
    """A `LaneSession` with pinned host memory and with the tables of its steps on the device."""

    def __init__(
        self, cuda: ModuleType, num_layers: int, finished: FinishedSteps, number: int, kept_ids: Int64
    ) -> None:
        self._cuda = cuda
        self.native: _cuda.LaneSession = cuda.LaneSession(num_layers, finished, number, kept_ids)
        self._steps: dict[int, StepPlan] = {}
        self._page_locks: dict[int, _cuda.HostRegistration] = {}
        self.set_draining = self.native.set_draining

    def publish(self, step: StepPlan, written: bytearray, tables: DeviceStepTables) -> None:
        self._steps[step.step_id] = step
        device_tables = (
            tables.slots,
            tables.query_lens,
            tables.context_lens,
            tables.block_tables,
            tables.num_common_blocks,
            tables.max_query_len,
        )
        arrays = step.slot_mapping, step.query_lens, step.context_lens, tables.host_block_tables
        self.native.publish(step.step_id, written, *arrays, device_tables)

    def retire(self, step_id: int) -> None:
        self.native.retire(step_id)
        self._steps.pop(step_id, None)

    def add_region(self, address: int, num_bytes: int) -> int:
        """Register host memory. Raises ResourceExhaustedError if it cannot be pinned."""
        try:
            page_lock = self._cuda.HostRegistration(address, num_bytes)
        except self._cuda.CudaError as error:
            raise ResourceExhaustedError(f"{num_bytes} bytes cannot be page-locked: {error}") from None
        number = self.native.add_region(address, num_bytes, "page_locked")
        self._page_locks[number] = page_lock
        return number

    def remove_region(self, number: int) -> None:
        self.native.remove_region(number)
        if (page_lock := self._page_locks.pop(number, None)) is not None:
            page_lock.close()


class ClientMemory:
    """A `CudaRegion`: a client's memory. It stays valid until it is closed here, even if the client frees it."""

    def __init__(self, cuda: ModuleType, compute: Compute, session: CudaLaneSession, memory: _cuda.IpcMemory) -> None:
        self._cuda, self._compute, self._session, self._memory = cuda, compute, session, memory
        self.number = session.native.add_region(memory.pointer, memory.num_bytes, "device")

    def check(self, end: int) -> None:
        pass

    def read(self, begin: int, num_bytes: int) -> Array:
        data = np.empty(num_bytes, np.uint8)
        self._copy(data.ctypes.data, self._memory.pointer + begin, num_bytes)
        return data

    def write(self, begin: int, data: Array) -> None:
        self._copy(self._memory.pointer + begin, data.ctypes.data, data.nbytes)

    def _copy(self, dst: int, src: int, num_bytes: int) -> None:
        """Copy outside the compute stream, and wait. Clients that need speed use a lane."""

        def work() -> None:
            self._cuda.copy_async(dst, src, num_bytes, self._compute.aside.handle)
            self._compute.aside.synchronize()

        self._compute.queue.guarded(work)

    def view(self, _begin: int, _num_bytes: int) -> None:
        return None

    def close(self) -> None:
        self._session.remove_region(self.number)
        self._memory.close()


class CudaLanes:
    """The lanes of one device."""

    def __init__(
        self,
        cuda: ModuleType,
        device: int,
        config: ServeConfig,
        compute: Compute,
        pool: int,
        num_blocks: int,
        scales: int,
    ) -> None:
        """`pool` and `scales` are addresses, as in `Kernels`. Raises CudaError."""
        layout = config.layout
        self._cuda, self._device, self._compute = cuda, device, compute
        self._num_layers = layout.num_layers
        self._spin_us = config.lane_spin_us
        self._executor: _cuda.CudaLaneExecutor = cuda.CudaLaneExecutor(
            device,
            compute.stream.handle,
            pool,
            DTYPE_NUMBERS[layout.dtype],
            num_blocks,
            layout.num_layers,
            layout.num_kv_heads,
            layout.head_size,
            layout.block_size,
            DTYPE_NUMBERS[config.dtype],
            scales,
            config.batch_invariant,
            LANE_WORKSPACE_BYTES,
            LOOK_US if config.lane_spin_us else 0.0,
        )

    def session(self, finished: FinishedSteps, number: int, kept_ids: Int64) -> CudaLaneSession:
        return CudaLaneSession(self._cuda, self._num_layers, finished, number, kept_ids)

    def open(self, memory: SealedMemory, session: CudaLaneSession) -> Any:
        return self._cuda.LaneServer(memory.map, session.native, self._executor, self._spin_us, self._failed)

    def _failed(self, message: str) -> None:
        self._compute.queue.fail(RuntimeError(f"a lane: {message}"))

    def open_client_memory(
        self, session: CudaLaneSession, raw_handle: bytes, device_id: int, byte_size: int
    ) -> ClientMemory:
        """Open a client's memory. Raises the errors of `Device.open_cuda_region`."""
        if device_id != self._device:
            raise InvalidArgumentError(f"is {device_id}, the pool is on device {self._device}", field="device_id")
        if byte_size >= 1 << 63:
            raise InvalidArgumentError(f"is {byte_size}, no device has that much", field="byte_size")
        try:
            memory = self._cuda.IpcMemory(self._device, raw_handle, byte_size)
        except self._cuda.CudaError as error:
            raise RegionNotOpenedError(f"cannot be opened: {error}", field="raw_handle") from None
        return ClientMemory(self._cuda, self._compute, session, memory)
