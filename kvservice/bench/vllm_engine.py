"""One vLLM in a process of its own, for `bench vllm`:  python -P -m kvservice.bench.vllm_engine SETUP

See engine_workloads.py. `llm` of the setup are the options of vLLM's LLM.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

from kvservice.bench.engine_workloads import Output, prompt_of, serve, serve_turns

# A connector may save during later steps than the one that computed the blocks: small requests after pauses.
SAVE_PAUSES_S = (0.05, 0.05, 0.05)
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


# The seconds of a call in a step, by the wall's clock and in CPU time of the thread.
CallTimes = dict[str, tuple[float, float]]


class StepTimes:
    """How long the connector's calls take in each step. vLLM adds these methods to those of its worker, which runs on
    the scheduler's thread if there is one worker."""

    def time_connector(self) -> None:
        """Take the times of all connectors of the class that this worker has, if it has one."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        self.step_times: list[CallTimes] = []
        self._in_step: CallTimes = {}
        self._depth = 0
        if has_kv_transfer_group():
            kind = type(get_kv_transfer_group())
            for name in CALLS:
                if hasattr(kind, name):
                    setattr(kind, name, self._timed(name, getattr(kind, name)))

    def take_step_times(self) -> list[CallTimes]:
        """Return the calls of each step since the last call. A step ends with what its workers are told."""
        taken, self.step_times = self.step_times, []
        return taken

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            self._depth += 1  # a call of another call's is part of it
            cpu, wall = time.thread_time(), time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
                self._depth -= 1
                if not self._depth:
                    before = self._in_step.get(name, (0.0, 0.0))
                    self._in_step[name] = before[0] + wall, before[1] + cpu
                    if name == STEP_END:
                        self.step_times.append(self._in_step)
                        self._in_step = {}

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
        self._num_preemptions = 0

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
            self.wait_for_saves()

    def wait_for_saves(self) -> None:
        for pause_s in SAVE_PAUSES_S:
            time.sleep(pause_s)
            serve(self, [prompt_of(self, self.block_size // 2, "wait")], 2)

    def take_counts(self) -> dict[str, Any]:
        """`preemptions`, and for `step_s` see StepTimes."""
        before, self._num_preemptions = (
            self._num_preemptions,
            sum(int(one.value) for one in self._llm.get_metrics() if one.name == "vllm:num_preemptions"),
        )
        step_s: list[CallTimes] = self._llm.collective_rpc("take_step_times")[0]
        return {"preemptions": self._num_preemptions - before, "step_s": step_s}


def make(setup: dict[str, Any]) -> tuple[VLLMEngine, dict[str, Any]]:
    import vllm

    engine = VLLMEngine(setup["llm"])
    engine.wait_for_saves()
    cache = engine.config.cache_config
    told = {"vllm": vllm.__version__, "pool_tokens": cache.num_gpu_blocks * cache.block_size}
    return engine, told | {"block_size": cache.block_size}


if __name__ == "__main__":
    serve_turns(make)
