"""Time to the first token of a vLLM on the CPU, with a prefix recomputed against loaded from the store.

    python -m kvservice.bench.vllm_first_token

It needs vLLM in the environment (kvservice/integrations/vllm/README.md), starts a daemon, and makes a Llama with random
weights. For each length it computes a new prompt, forgets vLLM's own prefix cache, and sends the prompt again, which
then loads all its blocks, so that vLLM computes one token. The result is one JSON object.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from kvservice.launch import Daemon

LENGTHS = (512, 1024, 2048, 4096)
REPEATS = 5
BLOCK_SIZE = 32
VOCABULARY = 32_000
# K/V of 64 KiB a token: 2 MiB a block.
SHAPE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
# The pool is not used.
POOL = {"num_layers": 1, "num_kv_heads": 1, "head_size": 32, "num_blocks": 64}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def save_model(directory: Path) -> None:
    """Write a Llama with random weights and without a tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=8192, dtype="float32", **SHAPE)
    LlamaForCausalLM(config).save_pretrained(directory)


def start_engine(model: Path, address: str) -> Any:
    os.environ.update(ENVIRONMENT)
    from vllm import LLM

    transfer = {
        "kv_connector": "KVServiceConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "kvservice.integrations.vllm",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"address": address, "transfer_timeout_s": 30},
    }
    return LLM(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=BLOCK_SIZE,
        max_model_len=max(LENGTHS) + BLOCK_SIZE,
        max_num_seqs=1,
        enforce_eager=True,
        prefix_caching_hash_algo="sha256_cbor",
        kv_transfer_config=transfer,
    )


def first_token(llm: Any, prompt: list[int]) -> tuple[float, int]:
    """Return the seconds to the first token, and the number of tokens that were not computed."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    return time.perf_counter() - start, output.num_cached_tokens


def measure(llm: Any, length: int) -> dict[str, Any]:
    """Measure one length. A prompt whose blocks are not saved yet is sent again."""
    recomputed, loaded = [], []
    for _ in range(REPEATS):
        prompt = [random.randrange(3, VOCABULARY) for _ in range(length)]
        seconds, cached = first_token(llm, prompt)
        assert cached == 0
        recomputed.append(seconds)
        while cached != min(length // BLOCK_SIZE * BLOCK_SIZE, length - 1):
            llm.reset_prefix_cache()
            seconds, cached = first_token(llm, prompt)
        loaded.append(seconds)
    medians = statistics.median(recomputed), statistics.median(loaded)
    return {"tokens": length, "recomputed_s": medians[0], "loaded_s": medians[1], "ratio": medians[0] / medians[1]}


def main() -> None:
    with tempfile.TemporaryDirectory() as directory, Daemon(store_gib=2, **POOL) as daemon:
        save_model(Path(directory))
        llm = start_engine(Path(directory), daemon.address)
        first_token(llm, list(range(3, 100)))
        rows = [measure(llm, length) for length in LENGTHS]
    print(json.dumps({"repeats": REPEATS, "model": SHAPE, "rows": rows}))


if __name__ == "__main__":
    main()
