"""The parts of vLLM that `bench vllm` uses, without a model. Token `n` of an answer is the length of the prompt plus
`n`. An engine with the OffloadingConnector does not start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

__version__ = "0.0.0"
BLOCK_SIZE, NUM_BLOCKS, VOCABULARY = 32, 24, 512

SamplingParams = SimpleNamespace


class LLM:
    def __init__(self, **options: Any) -> None:
        print("this is no answer")
        transfer = options.get("kv_transfer_config") or {"kv_connector": None}
        if transfer["kv_connector"] == "OffloadingConnector":
            raise ValueError("it does not start")
        self.stores = transfer["kv_connector"] is not None
        self.seen: set[tuple[int, ...]] = set()
        self.waiting: list[tuple[str, list[int], SamplingParams, int]] = []
        cache = SimpleNamespace(block_size=BLOCK_SIZE, num_gpu_blocks=NUM_BLOCKS)
        model = SimpleNamespace(get_vocab_size=lambda: VOCABULARY)
        self.vllm_config = SimpleNamespace(cache_config=cache, model_config=model)
        self.llm_engine = self

    def add_request(self, name: str, prompt: dict[str, list[int]], sampling: SamplingParams) -> None:
        tokens = prompt["prompt_token_ids"]
        full = (len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE
        self.waiting.append((name, tokens, sampling, full if tuple(tokens) in self.seen else 0))
        self.seen.add(tuple(tokens))

    def step(self) -> list[Any]:
        waiting, self.waiting = self.waiting, []
        outputs = []
        for name, prompt, sampling, num_cached in waiting:
            tokens = list(range(len(prompt), len(prompt) + sampling.max_tokens))
            completion = SimpleNamespace(token_ids=tokens)
            outputs.append(
                SimpleNamespace(request_id=name, outputs=[completion], num_cached_tokens=num_cached, finished=True)
            )
        return outputs

    def reset_prefix_cache(self) -> bool:
        if not self.stores:
            self.seen.clear()
        return True

    def collective_rpc(self, method: str) -> list[list[dict[str, tuple[float, float]]]]:
        """Steps of a connector: four of a millisecond, and one of eleven."""
        if method != "take_step_times" or not self.stores:
            return [[]]
        slow = {"wait_for_save": (0.01, 0.002), "get_finished": (0.001, 0.0), "take_events": (0.0001, 0.0)}
        return [[{"get_finished": (0.001, 0.001)}] * 4 + [slow]]

    def get_metrics(self) -> list[Any]:
        return [SimpleNamespace(name="vllm:num_preemptions", value=3)]
