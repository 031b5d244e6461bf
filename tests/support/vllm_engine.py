"""An engine of vLLM in a process of its own, driven by JSON lines.

The argument holds the options of `LLM`. A line on the standard input is a command, and its answer is a line on the
standard output that begins with MARK:

    {"prompts": [[1, 2], ...], "max_tokens": 8, "pause_at": 5}    generate. At step 5, and when the connector has saved
                                                                  everything, it answers "paused" and waits for a line.
                                                                  The answer has, for each prompt, `tokens` and
                                                                  `cached` (the number of tokens that were not computed)
    {..., "lora": "/path/of/adapter"}                             the same with an adapter
    {..., "embeds": "/path/of/tensor"}                            the same with embeddings instead of a prompt
    {"reset": true}                                               forget the engine's own prefix cache
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from typing import Any

MARK = "@@"


def answer(value: Any) -> None:
    print(MARK + json.dumps(value), flush=True)


def inputs(command: dict[str, Any]) -> list[Any]:
    """Return the prompts of a command as vLLM takes them."""
    if "embeds" not in command:
        return [{"prompt_token_ids": prompt} for prompt in command["prompts"]]
    import torch

    return [{"prompt_embeds": torch.load(command["embeds"])}]


def adapter(path: str | None) -> Any:
    if path is None:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest("adapter", 1 + zlib.crc32(path.encode()) % 1000, path)


def settle() -> None:
    """Wait until the connector has saved everything that it was given."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if has_kv_transfer_group() and (worker := get_kv_transfer_group()._worker) is not None:
        assert worker.settle(60)


def drain(engine: Any) -> None:
    """Go on until the connector holds no blocks. vLLM's server does so by itself."""
    connector = engine.engine_core.engine_core.scheduler.connector
    while connector is not None and connector.has_pending_push_work():
        engine.step()


def generate(engine: Any, command: dict[str, Any], preempted: list[str]) -> dict[str, Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=command["max_tokens"], ignore_eos=True)
    for number, prompt in enumerate(inputs(command)):
        engine.add_request(str(number), prompt, sampling, lora_request=adapter(command.get("lora")))
    outputs: dict[str, Any] = {}
    first_s: dict[str, float] = {}
    steps: list[float] = []
    preempted.clear()
    began = time.monotonic()
    while engine.has_unfinished_requests():
        if len(steps) == command.get("pause_at"):
            settle()
            answer("paused")
            sys.stdin.readline()
        start = time.monotonic()
        for output in engine.step():
            outputs[output.request_id] = output
            first_s.setdefault(output.request_id, time.monotonic() - began)
        steps.append(time.monotonic() - start)
    drain(engine)
    ordered = [outputs[str(number)] for number in range(len(inputs(command)))]
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in ordered],
        "cached": [output.num_cached_tokens for output in ordered],
        "first_token_s": [first_s[output.request_id] for output in ordered],
        "preemptions": len(preempted),
        "frees_late": engine.engine_core.engine_core.scheduler.defer_block_free,
        "steps_s": steps,
    }


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted: list[str] = []
    preempt = Scheduler._preempt_request

    def counted(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        preempt(self, request, *args, **kwargs)

    Scheduler._preempt_request = counted
    llm = LLM(**json.loads(sys.argv[1]))
    answer("ready")
    for line in sys.stdin:
        command = json.loads(line)
        if "reset" in command:
            answer(llm.reset_prefix_cache())
        else:
            answer(generate(llm.llm_engine, command, preempted))


if __name__ == "__main__":
    main()
