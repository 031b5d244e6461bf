"""The benchmarks as a user runs them: what they measure, print and refuse."""

from __future__ import annotations

import importlib
import json
import pkgutil
import shutil
from pathlib import Path

import mooncake_rig
import pytest
from bench_command import cells, invoke, measured, shown
from each_row import each_row

import kvservice.v1

# Mechanisms and sizes of a layer's tensors, by their names in results.
# Other stores.
PEERS = ("grpc", "redis", "mooncake", "mooncake_memory")
TRANSPORTS, SIZES = ("native", "unary", "inline", "region", "lane", "mapped"), ("16k", "256k", "2m")


def test_blocks() -> None:
    results = measured("blocks", "--quick")
    assert {"calibration_s", "append_step_256_s", "allocate_1024_s", "allocate_1024_hit_s", "fork_s"} <= set(results)
    assert all(results[name] > 0 for name in ("append_step_256_s", "allocate_1024_s", "fork_s", "free_s"))


@pytest.mark.third
@pytest.mark.slow
def test_schedule(tmp_path: Path) -> None:
    """Traces are made from seeds, or read."""
    trace = tmp_path / "mine.json"
    trace.write_text(json.dumps({"arrival_step": [3, 1], "prompt_len": [9, 20], "output_len": [2, 5]}))
    rows = cells(shown("schedule", "--quick", "--trace", str(trace)))
    costs, traces = ([row for row in rows if len(row) == columns] for columns in (3, 8))
    assert len(costs) == 7
    assert any(row[0] == "admit 8 prompts of 1024 tokens, nothing cached" for row in costs)
    assert all(float(row[1]) > 0 and float(row[2]) > 0 for row in costs)
    # Preemptions, tokens computed again, needed tokens, steps, waits until the first step, until the last.
    mine, *made = traces
    assert mine[:7] == ["mine.json", "0", "0", "34", "5", "0.0", "0"]
    needed = [int(row[3].replace(",", "")) for row in made]
    assert len(set(needed)) == 4
    assert all(200 * 100 < tokens < 200 * 1000 for tokens in needed)


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    wrong = (
        "", "[]", "{}", '{"arrival_step": [1], "prompt_len": [1], "output_len": []}',
        '{"arrival_step": [1], "prompt_len": [0], "output_len": [1]}',
        '{"arrival_step": [], "prompt_len": [], "output_len": []}',
    )  # fmt: skip
    with each_row() as row:
        for content in wrong:
            path.write_text(content)
            with row(content):
                refused = invoke("schedule", "--quick", "--trace", str(path))
                assert refused.exit_code == 1
                assert refused.stderr.startswith("Error: trace: ")


@pytest.mark.third
@pytest.mark.slow
def test_tenants() -> None:
    """Three daemons take turns: without tenants, with some, and with quotas for each."""
    rows = cells(shown("rpc", "--tenants", "3", "--quick"))
    assert [row[0] for row in rows] == ["echo", "allocate_1024", "free", "append_1"]
    for _, *figures in rows:
        assert figures[0].endswith("(1.000)")
        assert all(float(figure.split()[0]) > 0 for figure in figures)


@pytest.mark.slow
def test_floods() -> None:
    results = measured("floods", "--seconds", "0.5", "--rounds", "2", "--kind", "of an unknown type")
    assert [row["at"] for row in results["rows"]] == ["tcp", "unix"]
    for row in results["rows"]:
        assert row["sent_bytes"] > 0
        assert 0 < row["ping_p50_s"] <= max(row["longest_s"]) == row["ping_max_s"]
    refused = invoke("floods", "--kind", "NOTHING")
    assert refused.exit_code == 2
    assert "one of WINDOW_UPDATE, " in refused.output


@pytest.mark.slow
def test_soak() -> None:
    """So short a time has no verdict: what the daemon keeps for good is still being made."""
    results = json.loads(invoke("soak", "--seconds", "1", "--json").stdout.splitlines()[0])
    assert len(results["samples"]) == 30
    assert results["first"]["files"] > 50
    assert results["last"]["ping_p99_s"] > 0


@pytest.mark.slow
def test_limits() -> None:
    """Large requests of every RPC are sent, among them some without a meaning. A ping counts for a request."""
    names = [one.name for one in pkgutil.iter_modules(kvservice.v1.__path__) if one.name.endswith("_pb2")]
    files = [importlib.import_module(f"kvservice.v1.{name}").DESCRIPTOR for name in names]
    num_rpcs = sum(len(service.methods) for file in files for service in file.services_by_name.values())
    text = shown("limits", "--quick")
    idle, *rows = cells(text)
    assert idle[:4] == ["idle", "", "", ""]
    p50, p99, most = map(float, idle[4:])
    assert 0 < p50 <= p99 <= most
    with_meaning = [row for row in rows if row[1] != "a message without meaning"]
    rpcs = {row[0] for row in with_meaning}
    assert len(rpcs) == num_rpcs
    assert {row[0] for row in rows if row not in with_meaning} == rpcs - {"Connect", "Subscribe"}
    # At least one request of every RPC succeeds, except for the registrations of shared memory and of remote memory.
    succeeded = {row[0] for row in with_meaning if "OK" in row[2].split(", ")}
    assert rpcs - succeeded == {"RegisterRegion", "RegisterCudaRegion", "CreateRemoteRegion"}
    above = set()
    for rpc, content, _, _, *quantiles in rows:
        if quantiles != ["-", "-", "-"]:
            p50, p99, most = (float(cell.split()[0]) for cell in quantiles)
            assert 0 < p50 <= p99 <= most
            # A figure of 20.0 may be above 20 ms or not.
            above |= {f"{rpc} ({content})"} if p99 > 20 else set()
    # On a busy machine there are many, in several lines.
    _, said, last = text.partition("p99 above 20.0 ms: ")
    assert said
    assert [one for one in above if one not in " ".join(last.split())] == []


@pytest.mark.third
@pytest.mark.slow
def test_store() -> None:
    results = measured("store", "--quick")
    speeds = {name for name in results if "_put_" in name or "_get_" in name}
    ways = {name.split("_put_")[0] for name in speeds if "_put_" in name}
    assert {"memcpy", "mapped", "region", "inline", *PEERS} == ways | results["missing"].keys()
    assert ways.isdisjoint(results["missing"])
    assert speeds == {
        f"{way}_{call}_{size}_s" for way in ways for call in ("put", "get") for size in ("2m", "256k", "32k")
    }
    calls = {f"{call}_{count}_s" for call in ("lookup", "acquire", "reserve") for count in (32, 2048)}
    assert all(results[name] > 0 for name in speeds | calls | {"echo_s"})


@pytest.mark.third
@pytest.mark.slow
def test_rpc() -> None:
    """Calls by unary RPCs and over a stream, a layer's call by each transport, and what watching costs."""
    results = measured("rpc", "--quick")
    calls = ("echo", "allocate_1024", "append_64", "fork", "free", "decode_16k", "decode_256k", "decode_2m")
    for call in (f"{call}_{way}" for call in calls for way in ("unary", "stream")):
        assert 0 < results[f"{call}_p50_s"] <= results[f"{call}_p99_s"]
        assert results[f"{call}_per_s"] > 0
    by_transport = results["transports"]
    assert by_transport["refused"] == {}
    ways = [f"{way}_{size}" for way in TRANSPORTS for size in SIZES]
    for name in ("echo_unary", "echo_stream", "ring", *ways):
        assert 0 < by_transport[f"{name}_p50_s"] <= by_transport[f"{name}_p99_s"]
    watched = results["observers"]
    for name in (
        f"{who}_{call}" for who in ("nobody", "scraped", "pages", "events") for call in ("echo", "fork", "append_64")
    ):
        assert 0 < watched[f"{name}_p50_s"] <= watched[f"{name}_p99_s"]


@pytest.mark.third
@pytest.mark.slow
def test_restart() -> None:
    """The parts of a round add up."""
    options = ("--num-blocks", "2000", "--rounds", "1")
    text = shown("restart", *options)
    assert "Restarts of a daemon, cpu, 1 rounds, s" in text
    total, start, take_over, reconnect, upgrade, append = cells(text)
    assert total[0] == "SIGKILL to the first answered append"
    assert (total[1], upgrade[1]) == (total[2], upgrade[2])
    assert [row[2] for row in (start, take_over, reconnect, append)] == [""] * 4
    assert 0 < float(total[1]) == pytest.approx(sum(float(row[1]) for row in (start, take_over, reconnect)), rel=0.01)
    assert 0 < float(append[1]) <= float(upgrade[1])
    assert "The pool: 2,000 blocks, 0.0 GiB; 8 sequences, " in text
    assert text.endswith("; lost sequences: 0.\n")
    assert invoke("restart", *options, "--gib", "1").exit_code == 2


@pytest.mark.third
@pytest.mark.slow
def test_start() -> None:
    """A store of 2.1 GiB is complete some time after the daemon serves."""
    results = measured("start", "--store-gib", "2.1")
    assert 0 < results["serving_s"] < results["complete_s"]
    assert results["empty_serving_s"] > 0
    assert results["stop_s"] > 0
    assert results["ping_max_s"] > 0
    rows = cells(shown("start", "--store-gib", "0.1"))
    assert [row[0] for row in rows[1:3]] == ["start until it serves", "start until all memory is there"]


@pytest.mark.third
@pytest.mark.slow
def test_mooncake() -> None:
    """The tier compares all checksums itself. Figures are in units of the library."""
    mooncake_rig.programs()
    rows = cells(shown("mooncake", "--quick"))
    assert len(rows) == 6
    of_library = {cell.split()[-1] for row in rows if row[1] == "the library alone" for cell in row[2:]}
    assert of_library == {"(1.00)"}


@pytest.mark.third
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("fio") is None, reason="there is no fio")
def test_disk(tmp_path: Path) -> None:
    """Every way is measured on the same files, which are removed."""
    assert "start with 50," in shown("disk", "--quick", "--directory", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_without_fio_the_disk_bench_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    refused = invoke("disk", "--directory", str(tmp_path))
    assert refused.exit_code == 1
    assert "no fio" in refused.stderr
