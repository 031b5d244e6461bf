"""Outputs stream while other requests come and go."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from transformers import LogitsProcessor

from kvservice.client import KVClient
from kvservice.engines import AsyncLLM, ModelRunner, RequestOutput, SamplingParams
from kvservice.errors import (
    ConnectionLostError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    OutOfBlocksError,
)
from kvservice.integrations.transformers import pool_options
from kvservice.launch import Daemon

GREEDY = SamplingParams(temperature=0, max_tokens=20)
LONG = SamplingParams(temperature=0, max_tokens=900)


def run(scenario, directory, engine_daemon) -> None:
    """Run a scenario with an engine of its own on the shared daemon."""

    async def with_engine() -> None:
        async with AsyncLLM(directory, address=engine_daemon.address) as llm:
            await scenario(llm)

    asyncio.run(with_engine())


async def collect(outputs: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in outputs]


async def until_freed(client: KVClient) -> None:
    while client.stats().sequences:
        await asyncio.sleep(0.01)


def test_streams_grow_to_the_tokens_of_each_request_alone(directory, engine_daemon, prompts, alone) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        streams = await asyncio.gather(*(collect(llm.generate(prompt, GREEDY)) for prompt in prompts))
        for prompt, stream in zip(prompts, streams, strict=True):
            expected = alone(prompt, 20)
            for output in stream:
                ids = list(output.outputs[0].token_ids)
                assert ids == expected[: len(ids)]
                assert output.finished == (len(ids) == 20) == (output is stream[-1])

    run(scenario, directory, engine_daemon)


def test_closing_a_stream_aborts_its_request_and_no_other(directory, engine_daemon, prompts, alone) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        aborted = llm.generate(prompts[0], LONG)
        await anext(aborted)
        other = asyncio.create_task(collect(llm.generate(prompts[1], GREEDY)))
        await aborted.aclose()
        assert list((await other)[-1].outputs[0].token_ids) == alone(prompts[1], 20)
        with KVClient(engine_daemon.address) as client:
            await until_freed(client)

    run(scenario, directory, engine_daemon)


def test_a_cancelled_task_aborts_its_request(directory, engine_daemon, prompts) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        with KVClient(engine_daemon.address) as client:
            for at_once in (True, False):
                task = asyncio.create_task(collect(llm.generate(prompts[0], LONG)))
                await asyncio.sleep(0)
                while not at_once and not client.stats().sequences:
                    await asyncio.sleep(0.001)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                await until_freed(client)

    run(scenario, directory, engine_daemon)


def test_errors_are_raised_by_their_own_stream(directory, engine_daemon, prompts, alone) -> None:
    class Failing(LogitsProcessor):
        def __init__(self, error: BaseException) -> None:
            self.error = error

        def __call__(self, *_):
            raise self.error

    broken, ending = (SamplingParams(logits_processors=[Failing(one)]) for one in (ValueError("broken"), SystemExit(3)))

    no_params: Any = {"n": 1}

    async def scenario(llm: AsyncLLM) -> None:
        good = asyncio.create_task(collect(llm.generate(prompts[0], GREEDY)))
        for prompt, params, kind, said in (
            ([], GREEDY, InvalidArgumentError, "no tokens"),
            ([5] * 3000, GREEDY, OutOfBlocksError, "never"),
            ([5], no_params, InvalidArgumentError, "sampling_params"),
            ([5], SamplingParams(best_of=2), InvalidArgumentError, "best_of"),
            ([5], broken, ValueError, "broken"),
            ([5], ending, InternalError, r"SystemExit\(3\)"),
        ):
            with pytest.raises(kind, match=said):
                await collect(llm.generate(prompt, params))
        assert list((await good)[-1].outputs[0].token_ids) == alone(prompts[0], 20)

    run(scenario, directory, engine_daemon)


def test_an_exit_in_a_step_does_not_end_the_thread(directory, engine_daemon, prompts, alone, monkeypatch) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(ModelRunner, "run", lambda *_: sys.exit(3))
            with pytest.raises(InternalError, match=r"SystemExit\(3\)"):
                await collect(llm.generate(prompts[0], GREEDY))
        assert list((await collect(llm.generate(prompts[0], GREEDY)))[-1].outputs[0].token_ids) == alone(prompts[0], 20)

    run(scenario, directory, engine_daemon)


def test_if_the_daemon_stays_away_the_streams_end_with_the_error(directory, reference, prompts) -> None:
    async def scenario() -> None:
        with Daemon(**pool_options(reference.config, reference.dtype), num_blocks=64) as daemon:
            options: dict[str, Any] = {"client": {"reconnect_wait_s": 0.1}, "restart_wait_s": 0.1}
            async with AsyncLLM(directory, address=daemon.address, **options) as llm:
                stream = llm.generate(prompts[0], LONG)
                await anext(stream)
                daemon.process.kill()
                with pytest.raises(ConnectionLostError):
                    await collect(stream)
                with pytest.raises(FailedPreconditionError, match="the engine has failed"):
                    await collect(llm.generate(prompts[0], GREEDY))

    asyncio.run(scenario())


def test_closing_the_engine_ends_the_streams(directory, engine_daemon, prompts) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        stream = llm.generate(prompts[0], LONG)
        await anext(stream)
        await llm.close()
        with pytest.raises(FailedPreconditionError, match="closed"):
            await collect(stream)
        with pytest.raises(FailedPreconditionError, match="closed"):
            await collect(llm.generate(prompts[0], GREEDY))

    run(scenario, directory, engine_daemon)


def test_a_journal_is_refused(directory, engine_daemon, tmp_path) -> None:
    options: Any = {"journal": tmp_path / "journal"}
    with pytest.raises(InvalidArgumentError) as refused:
        AsyncLLM(directory, address=engine_daemon.address, **options)
    assert refused.value.field == "journal"
