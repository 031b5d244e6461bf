"""The exposition as a whole: its names, its form, what it must not tell."""

from __future__ import annotations

import base64
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import prometheus_server
import pytest
from ports import free_port
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from scraping import POOL, compute, exposition

from kvservice.client import KVClient, StoreNamespace
from kvservice.errors import OutOfBlocksError
from kvservice.launch import Daemon

REFERENCE = (Path(__file__).parents[2] / "deploy" / "METRICS.md").read_text()
# Digits that stand in no figure.
PROMPT = [1_987_654_000 + 7 * n for n in range(10)]
SEQUENCE_ID = 4_611_686_018_427_387_911
HTTP_TOKEN = "a-secret-of-the-page"
KEY = b"key of an image"
STORED = StoreNamespace(model="llama", block_bytes=64)
BLOCK_KEY = b"the key of a block in the store."


@dataclass(frozen=True)
class Exposed:
    text: str
    families: list[Metric]
    secrets: list[bytes]


@pytest.fixture(scope="module")
def exposed(tmp_path_factory: pytest.TempPathFactory) -> Exposed:
    """By a daemon with calls that bring forth every kind of metric."""
    port = free_port()
    options: dict[str, Any] = {"http_address": f"127.0.0.1:{port}", "http_token": HTTP_TOKEN, "event_token_ids": True}
    options |= {"store_gib": 1 / 64, "disk": tmp_path_factory.mktemp("disk"), "disk_gib": 1 / 4}
    options |= {"tcp_address": "127.0.0.1:0", "transfer_address": "127.0.0.1"}
    options["tenants"] = tmp_path_factory.mktemp("tenants") / "tenants.toml"
    options["tenants"].write_text('[tenant.acme]\nunix_socket = "admin"\nmax_sessions = 10\n')
    with (
        Daemon(**options, **POOL) as daemon,
        KVClient(daemon.address) as client,
        client.session("engine", tenant="acme") as kv,
        client.store(STORED) as store,
    ):
        store.put(BLOCK_KEY, np.zeros((1, 64), np.uint8))
        kv.allocate(PROMPT[:2], sequence_id=SEQUENCE_ID, extra_keys=[(0, KEY)])
        computed = compute(kv, PROMPT)
        kv.append([computed], [PROMPT[0]])
        kv.pin(PROMPT, ttl_s=60)
        kv.open_scheduler()
        kv.swap_out([computed])
        with pytest.raises(OutOfBlocksError):
            kv.allocate(PROMPT * 5)
        events = client.events(start_number=1)
        next(events)
        text = exposition(port)
        events.close()
        return Exposed(
            text, list(text_string_to_metric_families(text)), [kv.token, KEY, BLOCK_KEY, HTTP_TOKEN.encode()]
        )


def full_name(family: Metric) -> str:
    return family.name + ("_total" if family.type == "counter" else "")


def test_every_metric_is_explained(exposed: Exposed) -> None:
    """The generated table has each metric that a daemon exposes, with its labels, but for the labels of constants."""
    cells = "".join(re.findall(r"^\| (`kvservice_[^|]*) \|", REFERENCE, re.MULTILINE))
    explained = {name: set(labels.split(",")) - {""} for name, labels in re.findall(r"`(\w+)(?:\{([\w,]*)\})?`", cells)}
    families = [family for family in exposed.families if family.name.startswith("kvservice_")]
    told = {full_name(family): set() if family.name.endswith("_info") else labels_of(family) for family in families}
    assert len(told) > 40
    assert explained == told


def labels_of(family: Metric) -> set[str]:
    return {label for sample in family.samples for label in sample.labels} - {"le"}


def test_no_series_is_there_twice(exposed: Exposed) -> None:
    names = [line.rpartition(" ")[0] for line in exposed.text.splitlines() if not line.startswith("#")]
    assert len(names) == len(set(names)) > 200


def test_the_memory_includes_the_store(exposed: Exposed) -> None:
    (memory,) = (family for family in exposed.families if family.name == "kvservice_memory_bytes")
    assert {sample.labels["use"]: sample.value for sample in memory.samples}["store"] >= 1 << 24


def test_names_follow_the_conventions(exposed: Exposed) -> None:
    names = [full_name(family) for family in exposed.families if family.name.startswith("kvservice_")]
    assert len(names) == len(set(names))
    for name in names:
        assert re.fullmatch(r"kvservice_[a-z_]+", name)
        assert not re.search(r"_(ms|us|mb|gib|milliseconds|kilobytes)(_|$)", name), "base units only"
    for family in exposed.families:
        assert family.type in ("gauge", "counter", "histogram"), family.name
        assert family.documentation.endswith("."), family.name


def test_histograms_are_cumulative(exposed: Exposed) -> None:
    histograms = [family for family in exposed.families if family.type == "histogram"]
    assert len(histograms) == 9
    for family in histograms:
        series: dict[frozenset[tuple[str, str]], dict[str, list[tuple[float, float]]]] = {}
        for sample in family.samples:
            kind = sample.name.removeprefix(family.name)
            key = frozenset((name, at) for name, at in sample.labels.items() if name != "le")
            bound = float(sample.labels.get("le", "inf"))
            series.setdefault(key, {}).setdefault(kind, []).append((bound, sample.value))
        for kinds in series.values():
            bounds, counts = zip(*kinds["_bucket"], strict=True)
            assert list(bounds) == sorted(set(bounds))
            assert list(counts) == sorted(counts)
            assert bounds[-1] == float("inf")
            assert counts[-1] == kinds["_count"][0][1]
            assert kinds["_sum"][0][1] >= 0


@pytest.mark.slow
def test_prometheus_finds_no_fault(exposed: Exposed) -> None:
    prometheus_server.require()
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=exposed.text, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_no_secrets_and_no_tokens_are_exported(exposed: Exposed) -> None:
    for secret in exposed.secrets:
        for form in (repr(secret)[2:-1], secret.hex(), base64.b64encode(secret).decode(), str(list(secret))):
            assert form not in exposed.text
    for number in (*PROMPT, SEQUENCE_ID):
        assert str(number) not in exposed.text
