"""One SGLang in a process of its own, for `bench sglang`:  python -P -m kvservice.bench.sglang_engine SETUP

See engine_workloads.py. `engine` of the setup are the options of SGLang's Engine, `cache` is what is behind its pool,
`vocabulary` the number of token ids.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from kvservice.bench.engine_workloads import Output, prompt_of, serve, serve_turns

T = TypeVar("T")

# How many requests the engine has at one time. SGLang looks into its storage when a request comes, and does not when
# half of the host pool is wanted already: a crowd that comes at once would compute what the storage has.
IN_FLIGHT = 8
# SGLang writes to the host and to its storage in the background.
SAVE_S, POLL_S = 60.0, 0.02
# Prompts of this length push all others out of the engine's pool.
PUSHING_TOKENS = 2048
# An engine that was not pushed computes so many small prompts instead: to empty its pool it pauses for a second, and is
# slower by some milliseconds then than one that has just computed.
NUM_WAKING, WAKING_TOKENS = 8, 32


class SGLangEngine:
    """The engine as the workloads see it. Other threads of SGLang save: a prompt can be found when the engine is idle.

    To forget, the engine's pool is emptied with all of SGLang's own memory, and the storage stays; but where there is
    no storage, other prompts push everything into the host's memory. These are always the same, so they do not push
    anything out of that.
    """

    def __init__(self, options: dict[str, Any], cache: str, vocabulary: int) -> None:
        """`cache`: "none", "hicache" or "kvservice"."""
        import sglang

        self._engine = sglang.Engine(**options)
        self._manager, self._loop = self._engine.tokenizer_manager, self._engine.loop
        self.vocabulary, self.block_size, self.stores = vocabulary, options["page_size"], cache != "none"
        self._cache, self.pool_tokens = cache, int(options["max_total_tokens"])
        self._names = map(str, itertools.count())
        self._in_flight = asyncio.Semaphore(IN_FLIGHT)
        self._open: dict[str, asyncio.Task[Output]] = {}

    def submit(self, prompt: list[int], max_tokens: int, streamed: bool) -> str:  # noqa: ARG002
        """Every request has one output, at its end: what is timed alone has one token."""
        name = next(self._names)
        self._open[name] = self._loop.create_task(self._generate(name, prompt, max_tokens))
        return name

    async def _generate(self, name: str, prompt: list[int], max_tokens: int) -> Output:
        sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
        async with self._in_flight:
            answer = await self._engine.async_generate(input_ids=prompt, sampling_params=sampling)
        told = answer["meta_info"]
        if len(answer["output_ids"]) != max_tokens:
            raise RuntimeError(f"{len(answer['output_ids'])} tokens, not {max_tokens}: {told}")
        return Output(name, answer["output_ids"], told["cached_tokens"], True)

    def step(self) -> list[Output]:
        waiting = asyncio.wait(list(self._open.values()), return_when=asyncio.FIRST_COMPLETED)
        outputs = [task.result() for task in self._run(waiting)[0]]
        for output in outputs:
            del self._open[output.request]
        return outputs

    def forget(self) -> None:
        if self._cache == "hicache":
            self.wait_for_saves()
            num = self.pool_tokens // PUSHING_TOKENS + 2
            serve(self, [prompt_of(self, PUSHING_TOKENS, "pushing", each) for each in range(num)], 1)
            self.wait_for_saves()
        elif not (answer := self._run(self._manager.flush_cache(timeout_s=SAVE_S))).success:
            raise TimeoutError(f"the cache is not emptied: {answer.message}")
        else:
            for each in range(NUM_WAKING):
                serve(self, [prompt_of(self, WAKING_TOKENS, "waking", each)], 1)

    def wait_for_saves(self) -> None:
        """Poll until SGLang is idle. It refuses a change of its storage for that reason as long as it is not, and then
        because there is no such policy."""
        deadline = time.monotonic() + SAVE_S
        while self._cache != "none":
            change = self._manager.attach_hicache_storage("dynamic", hicache_storage_prefetch_policy="no policy")
            message: str = self._run(change).message
            if "Invalid hicache_storage_prefetch_policy" in message:
                return
            if "not idle" not in message or time.monotonic() > deadline:
                raise TimeoutError(f"SGLang still saves, or fails: {message}")
            time.sleep(POLL_S)

    def take_counts(self) -> dict[str, Any]:
        return {}

    def warm_up(self, longest: int) -> None:
        """Let SGLang compile what it compiles at the first use: long prompts, many at a time, and what is found."""
        prompts = [prompt_of(self, length, "warm", length) for length in (longest, *[PUSHING_TOKENS] * IN_FLIGHT)]
        for _ in range(2):
            serve(self, prompts, 4)
            self.wait_for_saves()
            self.forget()

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        result: T = self._loop.run_until_complete(call)
        return result


def make(setup: dict[str, Any]) -> tuple[SGLangEngine, dict[str, Any]]:
    import sglang

    engine = SGLangEngine(setup["engine"], setup["cache"], setup["vocabulary"])
    engine.warm_up(max(setup["sizes"]["lengths"]))
    told = {"sglang": sglang.__version__, "pool_tokens": engine.pool_tokens, "block_size": engine.block_size}
    return engine, told


if __name__ == "__main__":
    serve_turns(make)
