"""The largest requests to the scheduler."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import numpy as np

from kvservice.bench.sending import Sender
from kvservice.v1 import blocks_pb2, host_pb2, scheduler_pb2


def schedule_requests(sender: Sender) -> Callable[[], Awaitable[None]]:
    """The maximum number of requests, with equal shares of the tokens of a message, and the longest prompt."""
    info = sender.info
    count, most = info.max_request_sequences, info.max_request_tokens
    length = most // count - 1
    random = np.random.default_rng(4)
    opening = scheduler_pb2.OpenSchedulerRequest(max_step_tokens=most, max_running=count)
    many = scheduler_pb2.AddRequestsRequest(
        requests=[
            scheduler_pb2.ScheduledRequest(
                request_id=i, token_ids=random.integers(0, 50_000, length).tolist(), max_tokens=2, width=1
            )
            for i in range(count)
        ]
    )
    tokens = random.integers(0, 50_000, most - 1).tolist()
    longest = scheduler_pb2.AddRequestsRequest(
        requests=[scheduler_pb2.ScheduledRequest(request_id=0, token_ids=tokens, max_tokens=1, width=1)]
    )
    ids, requests = list(range(count)), f"{count} requests"

    async def step(content: str, **fields: object) -> scheduler_pb2.ScheduleResponse:
        """Make a batch, and commit its step."""
        request = scheduler_pb2.ScheduleRequest(**fields)  # type: ignore[arg-type]
        response = scheduler_pb2.ScheduleResponse.FromString(await sender.send("Schedule", content, request))
        if response.batch:
            await sender.send("Commit", content, host_pb2.CommitRequest(step_id=response.step.step_id))
        return response

    def report(batch: scheduler_pb2.ScheduleResponse) -> scheduler_pb2.StepReport:
        return scheduler_pb2.StepReport(batch=batch.batch, token_ids=[7] * len(batch.sampled_ids))

    async def run(content: str, add: scheduler_pb2.AddRequestsRequest) -> None:
        """Run requests to their end."""
        await sender.send("AddRequests", content, add)
        batch = await step(f"{content}, the prompts")
        while batch.batch:
            batch = await step(f"{content}, a token each", reports=[report(batch)])

    async def cycle() -> None:
        await sender.send("OpenScheduler", "", opening)
        await sender.send("MapPool", "writable", host_pb2.MapPoolRequest(writable=True))
        await run(requests, many)
        await run(f"{most - 1} tokens", longest)
        await sender.send("AddRequests", f"{requests}, all of them cached", many)
        describe = scheduler_pb2.DescribeRequestsRequest(return_token_ids=True)
        await sender.send("DescribeRequests", requests, describe)
        await sender.send("AbortRequests", requests, scheduler_pb2.AbortRequestsRequest(request_ids=ids))
        await sender.send("UnmapPool", "", host_pb2.UnmapPoolRequest())
        await sender.send("ResetPrefixCache", requests, blocks_pb2.ResetPrefixCacheRequest())

    return cycle
