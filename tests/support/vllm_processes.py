"""Processes of vLLM: an engine that is driven step by step, and an OpenAI server.

To import vLLM takes four times as long as to start a small engine. So one process imports it, and the others are forks.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import multiprocessing
import os
import runpy
import sys
import time
import urllib.request
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

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


@functools.cache
def forks() -> ForkServerContext:
    """Start the process that imports vLLM."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vllm_engine", __name__])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}).items():
            patch.setenv(name, value)
        forkserver.ensure_running()
    return context


def start(log: Path, call: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    process = forks().Process(target=_run, args=(str(log), call, *arguments))
    process.start()
    return process


def _run(log: str, call: Callable[..., None], *arguments: Any) -> None:
    os.setsid()  # vLLM may end its process group
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    # On CPUs vLLM asks for processes that import it again.
    forking = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda _=None: forking  # type: ignore[assignment]
    call(*arguments)


def _engine(options: dict[str, Any], pipe: Connection) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import vllm_engine

    vllm_engine.run(options, pipe)


def _server(arguments: list[str]) -> None:
    sys.argv[1:] = arguments
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


def end(process: ForkServerProcess) -> None:
    process.join(60)
    process.kill()
    process.join()
    process.close()


class Engine:
    """See vllm_engine.py. A context manager."""

    def __init__(self, model: Path, log: Path, **options: Any) -> None:
        self._log = log
        self._pipe, other = forks().Pipe()
        self._process = start(log, _engine, OPTIONS | {"model": str(model)} | options, other)
        other.close()  # otherwise the end of the process would not be seen

    def __enter__(self) -> Engine:
        try:
            assert self._answer() == "ready"
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        end(self._process)

    def begin(
        self, prompts: list[list[int]], max_tokens: int = 16, pause_at: int | None = None, **special: Any
    ) -> None:
        self._pipe.send({"prompts": prompts, "max_tokens": max_tokens, "pause_at": pause_at} | special)

    def generate(self, prompts: list[list[int]], max_tokens: int = 16, **special: Any) -> Any:
        """`special`: an adapter, or embeddings; see vllm_engine.py."""
        self.begin(prompts, max_tokens, **special)
        return self.result()

    def result(self) -> Any:
        return self._answer()

    def proceed(self) -> None:
        """Continue after a pause."""
        self._pipe.send({})

    def reset(self) -> None:
        self._pipe.send({"reset": True})
        assert self._answer() is True

    def _answer(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            pytest.fail(f"the engine ended:\n{self._log.read_text(errors='replace')[-4000:]}")


class Server:
    """vLLM's OpenAI server on a port of the loopback interface. A context manager."""

    def __init__(self, model: Path, log: Path, port: int, transfer: dict[str, Any]) -> None:
        self._log, self._url, self._model = log, f"http://127.0.0.1:{port}", str(model)
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items() if name != "enforce_eager"]
        flags += [f"--model={model}", f"--port={port}", "--host=127.0.0.1", "--enforce-eager"]
        flags += ["--enable-prompt-tokens-details", f"--kv-transfer-config={json.dumps(transfer)}"]
        self._process = start(log, _server, flags)

    def __enter__(self) -> Server:
        deadline = time.monotonic() + START_S
        while True:
            try:
                self.get("/health")
            except OSError:
                if self._process.is_alive() and time.monotonic() < deadline:
                    time.sleep(0.2)
                    continue
                text = self.log
                self.__exit__()
                pytest.fail(f"the server did not start:\n{text[-4000:]}")
            return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        end(self._process)

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
