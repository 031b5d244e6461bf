"""One vLLM in a process of its own, for `bench vllm`:  python -P -m kvservice.bench.vllm_engine SETUP

SETUP is a JSON object: `llm`, the options of vLLM's LLM, and `sizes`, those of the workloads. A line on the standard
input, {"workload": name, "number": n}, asks for a turn. The answer to it, and one when the engine is ready, is a line
of JSON on the standard output. vLLM's own output goes to the standard error.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from typing import Any, TextIO

from kvservice import plain_json
from kvservice.bench.vllm_workloads import WORKLOADS, Output, Sizes, prompt_of, serve

# A connector may save during later steps than the one that computed the blocks: small requests after pauses.
SETTLE_PAUSES_S = (0.05, 0.05, 0.05)
FORGET_S = 10.0


class VLLMEngine:
    """The engine as the workloads see it."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm = LLM(**options)
        self._engine = self._llm.llm_engine
        self.config = self._engine.vllm_config
        self.vocabulary: int = self.config.model_config.get_vocab_size()
        self.block_size: int = self.config.cache_config.block_size
        self.stores = options.get("kv_transfer_config") is not None
        self._names = map(str, itertools.count())

    def submit(self, prompt: list[int], max_tokens: int, streamed: bool) -> str:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        kind = RequestOutputKind.DELTA if streamed else RequestOutputKind.FINAL_ONLY
        name = next(self._names)
        sampling = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, output_kind=kind
        )
        self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        return name

    def step(self) -> list[Output]:
        return [
            Output(one.request_id, list(one.outputs[0].token_ids), one.num_cached_tokens or 0, one.finished)
            for one in self._engine.step()
        ]

    def forget(self) -> None:
        deadline = time.monotonic() + FORGET_S
        while not self._llm.reset_prefix_cache():
            if time.monotonic() > deadline:
                raise TimeoutError("blocks of requests that have ended are still in use")
            self.settle()

    def settle(self) -> None:
        for pause_s in SETTLE_PAUSES_S:
            time.sleep(pause_s)
            serve(self, [prompt_of(self, self.block_size // 2, "settle")], 2)

    def num_preemptions(self) -> int:
        """Return how many requests have been preempted since the start."""
        return sum(int(one.value) for one in self._llm.get_metrics() if one.name == "vllm:num_preemptions")


def answer_turns(engine: VLLMEngine, sizes: Sizes, commands: TextIO, answers: TextIO) -> None:
    for line in commands:
        command = json.loads(line)
        before = engine.num_preemptions()
        turn = WORKLOADS[command["workload"]](engine, sizes, command["number"])
        counts = {"preemptions": engine.num_preemptions() - before}
        print(plain_json.dumps(turn.as_values() | counts), file=answers, flush=True)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    setup = json.loads(sys.argv[1])
    import vllm

    engine = VLLMEngine(setup["llm"])
    engine.settle()
    cache = engine.config.cache_config
    told = {"vllm": vllm.__version__, "pool_tokens": cache.num_gpu_blocks * cache.block_size}
    print(plain_json.dumps(told | {"block_size": cache.block_size}), file=answers, flush=True)
    answer_turns(engine, Sizes.of(setup["sizes"]), sys.stdin, answers)


if __name__ == "__main__":
    main()
