"""Lane calls with event completion, by this process and by a client in another process (see `cuda_lane`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import gpu_peer
import numpy as np
from cuda_lane import DONE, REGION_BYTES, upload
from gpu_peer import download

from kvservice import _cuda


def submit(
    client: Any,
    step: int,
    num_layers: int,
    places: Sequence[Any],
    query: np.ndarray,
    output: tuple[int, int],
    **more: Any,
) -> Iterator[int]:
    """Call every layer of a step. Yields the offset of each output, from `output` on, when the call is answered."""
    region, offset = output
    for layer in range(num_layers):
        at = offset + layer * output_bytes(query)
        lse = at + aligned(query.nbytes)
        options = {name: value[layer] for name, value in more.items()}
        arguments = step, layer, False, query.shape[1], *places, (region, at), (region, lse)
        assert client.wait(client.submit(*arguments, by_event=True, **options), 30.0) == DONE
        yield at


def output_bytes(query: np.ndarray) -> int:
    """Return the size of an output and its log-sum-exp in bytes."""
    return aligned(query.nbytes) + aligned(4 * query.shape[0] * query.shape[1])


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // 256) * 256


def client_open_event(handle: bytes) -> None:
    lane = gpu_peer.kept["lane"]
    lane.event, lane.stream = _cuda.open_ipc_event(0, handle), _cuda.Stream(0)


def client_attend(steps: Sequence[int], num_layers: int, region: int, tensors: Sequence[Sequence[np.ndarray]]) -> bool:
    """Run steps whose calls follow each other. Only a stream waits for them, and copies each output. Returns whether a
    call was still in flight when it was answered."""
    lane = gpu_peer.kept["lane"]
    query = tensors[0][0]
    lane.copies = _cuda.DeviceMemory(0, len(steps) * num_layers * query.nbytes)
    lane.outputs = []
    _cuda.fill_async(lane.memory.pointer, 255, REGION_BYTES, 0)
    offset, under_way = 0, False
    places: list[list[tuple[int, int]]] = []
    for triple in tensors:
        places.append([])
        for tensor in triple:
            upload(tensor, lane.memory.pointer + offset)
            places[-1].append((region, offset))
            offset += aligned(tensor.nbytes)
    for step, triple in zip(steps, places, strict=True):
        for output in submit(lane.client, step, num_layers, triple, query, (region, offset)):
            under_way = under_way or not lane.event.done()
            lane.stream.wait(lane.event)
            there = lane.copies.pointer + len(lane.outputs) * query.nbytes
            _cuda.copy_async(there, lane.memory.pointer + output, query.nbytes, lane.stream.handle)
            lane.outputs.append(output)
        offset += num_layers * output_bytes(query)
    return under_way


def client_copies(query: np.ndarray) -> np.ndarray:
    """Synchronize the stream and return the outputs that it has copied."""
    lane = gpu_peer.kept["lane"]
    lane.stream.synchronize()
    copies = download(lane.copies.pointer, len(lane.outputs) * query.nbytes)
    return copies.view(query.dtype).reshape(-1, *query.shape)


def client_outputs(query: np.ndarray) -> np.ndarray:
    """Return the current outputs in the memory."""
    lane = gpu_peer.kept["lane"]
    outputs = [download(lane.memory.pointer + offset, query.nbytes) for offset in lane.outputs]
    return np.stack(outputs).view(query.dtype).reshape(-1, *query.shape)
