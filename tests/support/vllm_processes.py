"""Processes of vLLM: an engine that is driven step by step, and an OpenAI server."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from vllm_engine import MARK

HERE = Path(__file__).parent
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_LOG_STATS_INTERVAL": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "KMP_BLOCKTIME": "0",
    # Older versions have no fixed seed without it.
    "PYTHONHASHSEED": "0",
    # Both ends of a pipe are Python's; the log goes to a file.
    "PYTHONUNBUFFERED": "1",
}
START_S = 280.0
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 32,
    "max_model_len": 1280,
    "max_num_seqs": 8,
    # Prompts are computed in chunks.
    "max_num_batched_tokens": 256,
    "enforce_eager": True,
    "prefix_caching_hash_algo": "sha256_cbor",
}


def connector(address: str, **extra: Any) -> dict[str, Any]:
    """Return the `kv_transfer_config` of README.md. The time limits are for a machine that has other work."""
    return {
        "kv_connector": "KVServiceConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "kvservice.integrations.vllm",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"address": address, "lookup_timeout_s": 0.5, "transfer_timeout_s": 30} | extra,
    }


def source_of(path: str) -> str:
    """Return the text of a module of vLLM, without importing anything; "" without vLLM."""
    found = importlib.util.find_spec("vllm")
    return "" if found is None or found.origin is None else (Path(found.origin).parent / path).read_text()


class Engine:
    """See vllm_engine.py. A context manager."""

    def __init__(self, model: Path, log: Path, **options: Any) -> None:
        self._log = log
        arguments = [
            sys.executable,
            "-P",
            str(HERE / "vllm_engine.py"),
            json.dumps(OPTIONS | {"model": str(model)} | options),
        ]
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                arguments, env=os.environ | ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
            )

    def __enter__(self) -> Engine:
        try:
            assert self._answer() == "ready"
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()

    def begin(
        self, prompts: list[list[int]], max_tokens: int = 16, pause_at: int | None = None, **special: Any
    ) -> None:
        self._send({"prompts": prompts, "max_tokens": max_tokens, "pause_at": pause_at} | special)

    def generate(self, prompts: list[list[int]], max_tokens: int = 16, **special: Any) -> Any:
        """`special`: an adapter, or embeddings; see vllm_engine.py."""
        self.begin(prompts, max_tokens, **special)
        return self.result()

    def result(self) -> Any:
        return self._answer()

    def proceed(self) -> None:
        """Continue after a pause."""
        self._send({})

    def reset(self) -> None:
        self._send({"reset": True})
        assert self._answer() is True

    def _send(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if (text := line.decode(errors="replace")).startswith(MARK):
                return json.loads(text.removeprefix(MARK))
        pytest.fail(f"the engine ended:\n{self._log.read_text(errors='replace')[-4000:]}")


class Server:
    """vLLM's OpenAI server on a port of the loopback interface. A context manager."""

    def __init__(self, model: Path, log: Path, port: int, transfer: dict[str, Any]) -> None:
        self._log, self._url, self._model = log, f"http://127.0.0.1:{port}", str(model)
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items() if name != "enforce_eager"]
        arguments = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", self._model]
        arguments += ["--port", str(port), "--host", "127.0.0.1", "--enforce-eager", *flags]
        arguments += ["--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer)]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                arguments, env=os.environ | ENVIRONMENT, stdout=output, stderr=output, start_new_session=True
            )

    def __enter__(self) -> Server:
        deadline = time.monotonic() + START_S
        while True:
            try:
                self.get("/health")
            except OSError:
                if self._process.poll() is None and time.monotonic() < deadline:
                    time.sleep(0.2)
                    continue
                self.__exit__()
                pytest.fail(f"the server did not start:\n{self._log.read_text(errors='replace')[-4000:]}")
            return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
            self._process.wait()

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self._url + path, timeout=60) as response:
            return str(response.read().decode())

    def post(self, path: str, **body: Any) -> Any:
        request = urllib.request.Request(
            self._url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.loads(response.read() or b"null")

    def complete(self, prompt: list[int], max_tokens: int = 16, **options: Any) -> tuple[list[int], int]:
        """Return the tokens, and how many of the prompt's were not computed."""
        found = self.post(
            "/v1/completions",
            model=self._model,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0,
            ignore_eos=True,
            return_token_ids=True,
            **options,
        )
        details = found["usage"]["prompt_tokens_details"] or {}
        return found["choices"][0]["token_ids"], details.get("cached_tokens") or 0
