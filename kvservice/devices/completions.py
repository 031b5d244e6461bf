"""Threads that wait for events of a GPU, so that the end of a copy is noticed soon even when nothing follows it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from kvservice import _cuda

# An event and what follows it. None ends the thread.
_Completion: TypeAlias = "tuple[_cuda.Event, Callable[[], object]] | None"


class Completions:
    """Runs calls after the work on a stream. Each stream has a thread, which sleeps in the driver."""

    def __init__(self, cuda: ModuleType, device: int, fail: Callable[[BaseException], object]) -> None:
        """`fail` is called with an error of the device or of a call. The stream's later calls do not run then."""
        self._cuda = cuda
        self._device = device
        self._fail = fail
        self._spare: list[_cuda.Event] = []
        self._threads: dict[int, tuple[threading.Thread, SimpleQueue[_Completion]]] = {}

    def after(self, stream: _cuda.Stream, call: Callable[[], object]) -> None:
        """Run `call` in the stream's thread when all work launched on the stream is complete."""
        event = self._spare.pop() if self._spare else self._cuda.Event(self._device, blocking=True)
        event.record(stream.handle)
        if stream.handle not in self._threads:
            self._threads[stream.handle] = self._start()
        self._threads[stream.handle][1].put((event, call))

    def close(self) -> None:
        """End the threads after their calls. All streams must be idle."""
        for _, queue in self._threads.values():
            queue.put(None)
        for thread, _ in self._threads.values():
            thread.join()

    def _start(self) -> tuple[threading.Thread, SimpleQueue[_Completion]]:
        queue: SimpleQueue[_Completion] = SimpleQueue()
        # A daemon thread: the process of a faulted device exits although events are never reached.
        thread = threading.Thread(target=self._run, args=(queue,), name="copies", daemon=True)
        thread.start()
        return thread, queue

    def _run(self, queue: SimpleQueue[_Completion]) -> None:
        try:
            self._cuda.set_device(self._device)
            while (completion := queue.get()) is not None:
                event, call = completion
                event.synchronize()
                call()
                self._spare.append(event)
        except BaseException as error:
            self._fail(error)
