"""One vLLM in a process of its own, for `bench vllm`:  python -P -m kvservice.bench.vllm_engine SETUP

SETUP is a JSON object: `llm`, the options of vLLM's LLM, and `sizes`, those of the workloads. A line on the standard
input, {"workload": name, "number": n}, asks for a turn, and {"workload": name, "cached": [...]} for prompts of its last
turn again, see `from_cache`. The answer to it, and one when the engine is ready, is a line of JSON on the standard
output. vLLM's own output goes to the standard error.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from kvservice import plain_json
from kvservice.bench.vllm_workloads import WORKLOADS, Output, Sizes, Turn, from_cache, prompt_of, serve

# A connector may save during later steps than the one that computed the blocks: small requests after pauses.
SETTLE_PAUSES_S = (0.05, 0.05, 0.05)
FORGET_S = 10.0
# vLLM calls these methods of a connector on the thread that schedules and computes.
CALLS = (
    *("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta"),
    *("update_connector_output", "request_finished", "request_finished_all_groups", "take_events"),
    *("has_pending_push_work", "has_pending_block_frees", "handle_preemptions", "start_load_kv", "wait_for_layer_load"),
    *("save_kv_layer", "wait_for_save", "get_finished", "get_transfer_results", "get_block_ids_with_load_errors"),
    *("get_kv_connector_stats", "build_connector_worker_meta"),
)
STEP_END = "build_connector_meta"


class StepTimes:
    """How long the connector's calls take together in each step. vLLM adds these methods to those of its worker, which
    runs on the scheduler's thread if there is one worker."""

    def time_connector(self) -> None:
        """Take the times of all connectors of the class that this worker has, if it has one."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        self.step_times: list[float] = []
        self._in_step_s, self._depth = 0.0, 0
        if has_kv_transfer_group():
            kind = type(get_kv_transfer_group())
            for name in CALLS:
                if hasattr(kind, name):
                    setattr(kind, name, self._timed(getattr(kind, name), ends=name == STEP_END))

    def take_step_times(self) -> list[float]:
        """Return the seconds of each step since the last call. A step ends with what its workers are told."""
        taken, self.step_times = self.step_times, []
        return taken

    def _timed(self, call: Callable[..., Any], *, ends: bool) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            self._depth += 1  # a call of another call's is part of it
            began = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                self._depth -= 1
                if not self._depth:
                    self._in_step_s += time.perf_counter() - began
                    if ends:
                        self.step_times.append(self._in_step_s)
                        self._in_step_s = 0.0

        return timed


class VLLMEngine:
    """The engine as the workloads see it."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm = LLM(**options, worker_extension_cls=f"{StepTimes.__module__}.{StepTimes.__qualname__}")
        self._llm.collective_rpc("time_connector")
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

    def take_step_times(self) -> list[float]:
        """See StepTimes."""
        times: list[float] = self._llm.collective_rpc("take_step_times")[0]
        return times

    def num_preemptions(self) -> int:
        """Return how many requests have been preempted since the start."""
        return sum(int(one.value) for one in self._llm.get_metrics() if one.name == "vllm:num_preemptions")


def answer_turns(engine: VLLMEngine, sizes: Sizes, commands: TextIO, answers: TextIO) -> None:
    turns: dict[str, Turn] = {}
    for line in commands:
        command = json.loads(line)
        if "cached" in command:
            again = from_cache(engine, turns[command["workload"]], command["cached"])
            print(plain_json.dumps({"answers": again}), file=answers, flush=True)
            continue
        before = engine.num_preemptions()
        engine.take_step_times()
        turn = turns[command["workload"]] = WORKLOADS[command["workload"]](engine, sizes, command["number"])
        counts = {"preemptions": engine.num_preemptions() - before, "step_s": engine.take_step_times()}
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
