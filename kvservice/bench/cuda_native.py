"""The work of a layer on a CUDA device without a daemon: launched and awaited, on tensors in device memory."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from kvservice.bench import cuda_timing, transports
from kvservice.bench.cuda_inputs import TorchScratch, device_array, random_tensor
from kvservice.bench.harness import seconds_of
from kvservice.ops import cuda


class CudaNativeWay:
    """As NativeWay. `num_tokens` is by size."""

    def __init__(self, num_tokens: Mapping[str, int]) -> None:
        """Raises FailedPreconditionError if there is no device."""
        cuda_timing.require_device()
        sizes = (1 + max(num_tokens.values()), transports.NUM_LAYERS, 2, transports.NUM_KV_HEADS)
        self._pool = random_tensor(*sizes, transports.HEAD_SIZE * transports.BLOCK_SIZE)
        self._num_tokens = num_tokens
        self._scratch = TorchScratch()

    def step(self, size: str) -> list[float]:
        """See Way."""
        num_tokens = self._num_tokens[size]
        heads = (transports.NUM_HEADS, transports.NUM_KV_HEADS, transports.NUM_KV_HEADS, transports.NUM_HEADS)
        tensors = [random_tensor(num_tokens, count, transports.HEAD_SIZE) for count in heads]
        tables = [torch.from_numpy(array).cuda() for array in transports.native_tables(num_tokens)]
        torch.cuda.synchronize()
        stream = torch.cuda.current_stream()
        pool, query, key, value, out = (device_array(tensor) for tensor in (self._pool, *tensors))
        slots, query_lens, block_tables, context_lens = (device_array(table) for table in tables)

        def layer(number: int) -> None:
            cuda.write_kv(pool, number, slots, key, value, stream=stream.cuda_stream)
            cuda.attention(
                pool,
                number,
                query,
                query_lens,
                block_tables,
                context_lens,
                max_query_len=1,
                num_common_blocks=1,
                out=out,
                workspace=self._scratch,
                stream=stream.cuda_stream,
            )
            stream.synchronize()

        return [seconds_of(partial(layer, number)) for number in range(transports.NUM_LAYERS)]
