"""The parts of SGLang that `bench sglang` uses, without a model. Token `n` of an answer is the length of the prompt
plus `n`. The pool forgets what was used least recently; below it are HiCache's host memory, which is emptied with the
pool, or kvservice's storage, which is not. What is computed is saved when the engine has been asked twice whether it is
idle."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

__version__ = "0.0.0"


class Engine:
    def __init__(self, **options: Any) -> None:
        print("this is no answer")
        assert options["attention_backend"] == "fa3"
        if options["random_seed"] == 1 and options.get("enable_hierarchical_cache"):
            raise ValueError("it does not start")
        self.loop = asyncio.new_event_loop()
        self.tokenizer_manager = Manager(options)
        self._options, self._page_size = options, options["page_size"]

    async def async_generate(self, input_ids: list[int], sampling_params: dict[str, Any]) -> dict[str, Any]:
        assert sampling_params["ignore_eos"]
        manager, prompt = self.tokenizer_manager, tuple(input_ids)
        manager.running += 1
        manager.most_running = max(manager.most_running, manager.running)
        await asyncio.sleep(0)
        full = (len(prompt) - 1) // self._page_size * self._page_size
        cached = full if prompt in manager.pool or prompt in manager.saved else 0
        manager.keep(prompt)
        num_tokens = sampling_params["max_new_tokens"]
        manager.running -= 1
        tokens = list(range(len(prompt), len(prompt) + num_tokens))
        return {"output_ids": tokens, "meta_info": {"cached_tokens": cached, "most_running": manager.most_running}}


class Manager:
    def __init__(self, options: dict[str, Any]) -> None:
        self.pool: dict[tuple[int, ...], None] = {}
        self.saved: set[tuple[int, ...]] = set()
        self.unsaved: set[tuple[int, ...]] = set()
        self.running = self.most_running = self.asked = 0
        self._num_tokens = options["max_total_tokens"]
        self._has_host = options.get("enable_hierarchical_cache", False)
        if self._has_host:
            assert options["hicache_mem_layout"] == "page_first"
        self._has_storage = options.get("hicache_storage_backend") == "dynamic"
        if self._has_storage:
            assert json.loads(options["hicache_storage_backend_extra_config"])["kvservice"]["address"]

    def keep(self, prompt: tuple[int, ...]) -> None:
        self.pool.pop(prompt, None)
        self.pool[prompt] = None
        self.unsaved.add(prompt)
        while sum(map(len, self.pool)) > self._num_tokens:
            del self.pool[next(iter(self.pool))]

    async def flush_cache(self, timeout_s: float) -> SimpleNamespace:
        assert timeout_s > 0
        self._save()
        self.pool.clear()
        if not self._has_storage:
            self.saved.clear()
        return SimpleNamespace(success=True, message="")

    async def attach_hicache_storage(self, backend: str, *, hicache_storage_prefetch_policy: str) -> SimpleNamespace:
        assert backend == "dynamic"
        self.asked += 1
        if self.asked % 2:
            return SimpleNamespace(success=False, message="Reject attach: scheduler is not idle. #queue-req=0")
        self._save()
        message = f"Invalid hicache_storage_prefetch_policy: {hicache_storage_prefetch_policy!r}. Expected one of"
        return SimpleNamespace(success=False, message=message)

    def _save(self) -> None:
        if self._has_host:
            self.saved |= self.unsaved
        self.unsaved.clear()
