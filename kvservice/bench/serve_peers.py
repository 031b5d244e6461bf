"""The library's own ways to serve requests: `generate` in static batches, and its continuous batching."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from kvservice.bench.peer_process import PeerMissingError
from kvservice.bench.serve_figures import Served
from kvservice.bench.serve_trace import ServeTrace, TraceRequest
from kvservice.integrations.transformers.arguments import CACHE

# Tokens of one step of the library's continuous batching, and of a page of its cache.
STEP_TOKENS = {"cpu": 1024, "cuda": 8192}
PAGE_TOKENS = 32
# The library renamed it after 5.17.
PAGE_OPTION = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"


class _TokenClock(StoppingCriteria):
    """Records the time of every token. It stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:  # noqa: ARG002
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class StaticBatches:
    """`generate` over batches of the requests that wait, at most `size` of them, padded on the left.

    A batch generates until its longest output is complete. `open_cache` returns a cache for each batch; None leaves it
    to the library.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        size: int,
        open_cache: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        # The library types `self` of generate() with a protocol that its own models do not match.
        self.model: Any = model
        self.size, self.open_cache = size, open_cache

    def serve(self, trace: ServeTrace) -> Served:
        served = Served([], [])
        start = time.perf_counter()
        while len(served.token_ids) < len(trace):
            waiting = trace.requests[len(served.token_ids) :]
            time.sleep(max(0.0, start + waiting[0].arrival_s - time.perf_counter()))
            now_s = time.perf_counter() - start
            batch = [request for request in waiting[: self.size] if request.arrival_s <= now_s]
            token_ids, times = self._generate(batch)
            for request, row in zip(batch, token_ids, strict=True):
                served.token_ids.append(row[: request.num_tokens])
                served.token_times_s.append([at - start for at in times[: request.num_tokens]])
        return served

    def _generate(self, batch: Sequence[TraceRequest]) -> tuple[list[list[int]], list[float]]:
        longest = max(len(request.prompt) for request in batch)
        ids = torch.zeros((len(batch), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, longest - len(request.prompt) :] = torch.from_numpy(request.prompt)
            mask[row, longest - len(request.prompt) :] = 1
        clock = _TokenClock()
        with self.open_cache() as cache, torch.no_grad():
            output = self.model.generate(
                ids.to(self.model.device),
                attention_mask=mask.to(self.model.device),
                max_new_tokens=max(request.num_tokens for request in batch),
                do_sample=False,
                **{CACHE: cache},
                stopping_criteria=StoppingCriteriaList([clock]),
            )
        return output[:, longest:].tolist(), clock.times


class LibraryBatching:
    """The library's continuous batching, with a new manager and an empty cache for each run."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model

    def serve(self, trace: ServeTrace) -> Served:
        step_tokens = STEP_TOKENS[self.model.device.type]
        blocks = sum(-(-(len(one.prompt) + one.num_tokens) // PAGE_TOKENS) for one in trace.requests)
        options: dict[str, Any] = {PAGE_OPTION: PAGE_TOKENS}
        batching = ContinuousBatchingConfig(**options, num_blocks=blocks + 16, max_batch_tokens=step_tokens)
        greedy: Any = GenerationConfig  # it has no types
        manager = self.model.init_continuous_batching(
            generation_config=greedy(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=trace.longest),
            continuous_batching_config=batching,
        )
        manager.warmup()
        manager.start()
        try:
            return self._answers(manager, trace)
        finally:
            manager.stop(block=True)
            manager.destroy()

    def _answers(self, manager: Any, trace: ServeTrace) -> Served:
        served = Served([[] for _ in trace.requests], [[] for _ in trace.requests])
        added = answered = 0
        start = time.perf_counter()
        while answered < len(trace):
            now_s = time.perf_counter() - start
            while added < len(trace) and trace.requests[added].arrival_s <= now_s:
                request = trace.requests[added]
                manager.add_request(
                    request.prompt.tolist(),
                    request_id=str(added),
                    max_new_tokens=request.num_tokens,
                    record_timestamps=True,
                )
                added += 1
            until_next_s = trace.requests[added].arrival_s - now_s if added < len(trace) else 1.0
            result = manager.get_result(timeout=max(0.001, until_next_s))
            if result is None:
                if not manager.is_running():
                    raise PeerMissingError("the thread of the library's continuous batching has ended")
                continue
            if result.error is not None:
                raise PeerMissingError(result.error)
            number = int(result.request_id)
            served.token_ids[number] = list(result.generated_tokens)
            served.token_times_s[number] = [at - start for at in result.timestamps]
            answered += 1
        return served
