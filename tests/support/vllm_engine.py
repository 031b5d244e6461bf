"""An engine of vLLM in a process of its own, driven by messages. vllm_processes.py imports this module once, and forks
its engines from there.

A message is a command, and is answered:

    {"prompts": [[1, 2], ...], "max_tokens": 8, "pause_at": 5}    generate. At step 5, and when the connector has saved
                                                                  everything, it answers "paused" and waits for a
                                                                  message. The answer has, for each prompt, `tokens` and
                                                                  `cached` (the number of tokens that were not computed)
    {..., "lora": "/path/of/adapter"}                             the same with an adapter
    {..., "embeds": "/path/of/tensor"}                            the same with embeddings instead of a prompt
    {"reset": true}                                               forget the engine's own prefix cache
"""

from __future__ import annotations

import time
import zlib
from multiprocessing.connection import Connection
from typing import Any

import torch
import vllm.v1.worker.cpu_worker  # noqa: F401  engines import it
from vllm import LLM, ModelRegistry, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.scheduler import Scheduler

# To look at a class of models that is not loaded, vLLM starts a process that imports all of it.
for kind in ("Llama", "Gemma3", "GptOss", "GraniteMoeHybrid", "Qwen3Next"):
    name = f"{kind}ForCausalLM"
    ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def inputs(command: dict[str, Any]) -> list[Any]:
    """Return the prompts of a command as vLLM takes them."""
    if "embeds" not in command:
        return [{"prompt_token_ids": prompt} for prompt in command["prompts"]]
    return [{"prompt_embeds": torch.load(command["embeds"])}]


def adapter(path: str | None) -> Any:
    return None if path is None else LoRARequest("adapter", 1 + zlib.crc32(path.encode()) % 1000, path)


def wait_for_saves() -> None:
    """Wait until the connector has saved everything that it was given."""
    if has_kv_transfer_group() and (worker := get_kv_transfer_group()._worker) is not None:
        assert worker.wait_for_saves(60)


def drain(engine: Any) -> None:
    """Go on until the connector holds no blocks. vLLM's server does so by itself."""
    connector = engine.engine_core.engine_core.scheduler.connector
    while connector is not None and connector.has_pending_push_work():
        engine.step()


def generate(engine: Any, command: dict[str, Any], preempted: list[str], pipe: Connection) -> dict[str, Any]:
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
            wait_for_saves()
            pipe.send("paused")
            pipe.recv()
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


def run(options: dict[str, Any], pipe: Connection) -> None:
    """Answer commands until nobody sends any. `options` are those of `LLM`."""
    preempted: list[str] = []
    preempt = Scheduler._preempt_request

    def counted(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        preempt(self, request, *args, **kwargs)

    Scheduler._preempt_request = counted
    llm = LLM(**options)
    pipe.send("ready")
    while True:
        try:
            command = pipe.recv()
        except EOFError:
            return
        if "reset" in command:
            pipe.send(llm.reset_prefix_cache())
        else:
            pipe.send(generate(llm.llm_engine, command, preempted, pipe))
