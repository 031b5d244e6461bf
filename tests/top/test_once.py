"""`kvservice top --once`, as called by a script, and refused arguments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from each_row import each_row
from inspected_pool import Inspected, add_scheduler, add_tiers, add_transfers
from top_screen import top

from kvservice.errors import DrainingError, ObserverUnavailableError
from kvservice.v1 import inspect_pb2, store_pb2


def test_json_is_the_snapshot_with_numbers(inspected: Inspected) -> None:
    done = top("--once", "--json", "--address", inspected.address)
    assert (done.exit_code, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["pool"]["num_blocks"] == 100
    assert found["pool"]["draining"] is False
    assert found["rates"]["hit_share"] == 0.25
    assert [call["p50_s"] for call in found["calls"]] == [310e-6, 120e-6, None]
    assert [row["sequence_id"] for row in found["sequences"]] == [(1 << 62) + place for place in range(5)]
    assert found["num_sequences"] == 5
    assert found["sessions"][1] == {
        "session_id": 2,
        "name": "batch",
        "tenant": "",
        "attached": False,
        "age_s": 90.0,
        "sequences": 2,
        "swapped_sequences": 0,
        "tokens": 2000,
        "blocks": 12,
        "regions": 0,
        "region_bytes": 0,
        "lane": False,
        "computed_tokens": 0,
        "query_tokens": 0,
        "hit_tokens": 0,
        "scheduler": None,
        "engine": None,
    }


def test_tables_for_people(inspected: Inspected) -> None:
    done = top("--once", "--address", inspected.address, "--sort", "tokens")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "50 of 100 blocks, 50.0 %" in done.stdout
    assert "Store 1.0 GiB of 4.0 GiB  blocks" in done.stdout
    assert "found 75.0 %" in done.stdout
    assert "prefix hits 25.0 % of 1,000 tokens/s" in done.stdout
    assert "310 µs" in done.stdout
    assert "\x1b" not in done.stdout
    names = [line.split()[1] for line in done.stdout.splitlines() if line.split()[2:3] in (["acme"], ["zeta"], ["12"])]
    assert names == ["[red]evil�[2J", "batch", "chat"]


def test_a_store_whose_memory_is_not_complete(inspected: Inspected) -> None:
    inspected.snapshot.store.ready_bytes = 2 << 30
    assert "Store 1.0 GiB of 4.0 GiB  ready 2.0 GiB  blocks" in top("--once", "--address", inspected.address).stdout


def test_a_line_for_each_tier(inspected: Inspected) -> None:
    assert "Disk" not in top("--once", "--address", inspected.address).stdout
    add_tiers(inspected.snapshot)
    done = top("--once", "--address", inspected.address)
    assert (done.exit_code, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("Disk"))
    assert lines[at - 2].startswith("Store")
    assert [line.rstrip() for line in lines[at - 1 : at + 3]] == [
        "Pool to store 3.0 MiB/s  back 0 B/s  saved 900  loaded 80  tokens found below 1,280  waiting 0",
        "Disk 1.2 TiB of 2.0 TiB  open       values 600,000  found 63.4 %  read 1.0 GiB/s  written 300.0 MiB/s  "
        "latency 310 µs  errors 0   suspensions 0",
        "Mooncake -               suspended  values -        found -       read 0 B/s      written 0 B/s        "
        "latency -       errors 12  suspensions 3",
        "Saved sessions 3  bytes 5.0 GiB of 16.0 GiB  saved 0  restored 0  expired 0",
    ]
    found = json.loads(top("--once", "--json", "--address", inspected.address).stdout)
    assert [(tier["name"], tier["state"], tier["hit_share"]) for tier in found["tiers"]] == [
        ("disk", "open", 0.634),
        ("mooncake", "suspended", None),
    ]


def test_transfers_for_people(inspected: Inspected) -> None:
    assert "Transfer" not in top("--once", "--address", inspected.address).stdout
    add_transfers(inspected.snapshot)
    done = top("--once", "--address", inspected.address)
    assert (done.exit_code, done.stderr) == (0, "")
    (line,) = [line.rstrip() for line in done.stdout.splitlines() if line.startswith("Transfer")]
    assert line == (
        "Transfer engines 1 of 2  memory 48.0 MiB  in 300.0 MiB/s  out 1.0 GiB/s  in messages 5.0 MiB/s  running 1  "
        "done 100  p50 20.0 ms  p99 -  failed 3"
    )


def test_schedulers_for_people(inspected: Inspected) -> None:
    assert "Schedulers" not in top("--once", "--address", inspected.address).stdout
    add_scheduler(inspected.snapshot)
    done = top("--once", "--address", inspected.address)
    assert (done.exit_code, done.stderr) == (0, "")
    words = " ".join(done.stdout.split())
    assert "Requests waiting 70 running 25 swapped 4 stalled 3 generated 2,500 tokens/s" in words
    assert "preempted 0.5/s" in words
    assert "first token p50 200.0 ms p99 1.50 s between tokens p50 30.0 ms p99 -" in words
    assert "proposals right 62.5 %" in words
    assert "1 chat 70 25 4 3 1,234 56,789 75.0 % 13 640 90.0 %" in words


def test_engines_for_people(inspected: Inspected) -> None:
    assert "Engines" not in top("--once", "--address", inspected.address).stdout
    inspected.snapshot.sessions[0].engine.MergeFrom(
        store_pb2.EngineReport(
            loads_in_flight=2,
            prompt_tokens=4000,
            found_tokens=3000,
            blocks_loaded=120,
            blocks_not_loaded=1,
            blocks_saved=77,
            blocks_not_saved=3,
            blocks_skipped=5,
        )
    )
    done = top("--once", "--address", inspected.address)
    assert (done.exit_code, done.stderr) == (0, "")
    assert "1 chat 75.0 % 4,000 2 120 1 77 3 5" in " ".join(done.stdout.split())


def test_a_restart_is_in_the_summary(inspected: Inspected) -> None:
    assert "Restarted" not in top("--once", "--address", inspected.address).stdout
    inspected.snapshot.restart.MergeFrom(
        inspect_pb2.RestartSnapshot(outcome="taken over", is_kept=True, ended="signal 9", num_restarts=3)
    )
    summary = "after signal 9: took over 2 sessions in 0.21 s, down 1.1 s; lost 1 sequence"
    inspected.snapshot.restart.summary = summary
    done = top("--once", "--address", inspected.address)
    assert (done.exit_code, done.stderr) == (0, "")
    assert f"Restarted 3 times, last 1:02:05 ago {summary}" in done.stdout
    found = json.loads(top("--once", "--json", "--address", inspected.address).stdout)
    assert found["restart"]["num_restarts"] == 3


def test_it_says_that_nothing_is_kept(inspected: Inspected) -> None:
    inspected.snapshot.restart.summary = "nothing is kept: the memory ends with the process of the daemon"
    assert "\nnothing is kept" in top("--once", "--address", inspected.address).stdout


def test_long_tables_say_what_they_leave_out(inspected: Inspected) -> None:
    for number in range(100):
        inspected.snapshot.sequences.add(session_id=1, session_name="chat", sequence_id=number, blocks=1)
    inspected.snapshot.num_sequences = 2000
    assert "and 1,960 more" in top("--once", "--address", inspected.address).stdout


def test_the_filter_is_the_daemons_search(inspected: Inspected) -> None:
    found = json.loads(top("--once", "--json", "--filter", "chat", "--address", inspected.address).stdout)
    assert [request.search for request in inspected.requests] == ["chat"]
    assert [row["name"] for row in found["sessions"]] == ["chat"]


def test_an_observer_that_starts_is_waited_for(inspected: Inspected) -> None:
    inspected.errors = [ObserverUnavailableError("it starts"), ObserverUnavailableError("it starts")]
    assert top("--once", "--json", "--address", inspected.address).exit_code == 0
    assert len(inspected.requests) == 3


def test_other_errors_are_printed_at_once(inspected: Inspected) -> None:
    inspected.errors = [DrainingError("the daemon is shutting down")]
    refused = top("--once", "--address", inspected.address)
    assert refused.exit_code == 1
    assert refused.stderr == f"Error: no answer from {inspected.address}: the daemon is shutting down\n"
    assert len(inspected.requests) == 1


def test_the_address_is_the_one_that_serve_would_listen_on(inspected: Inspected) -> None:
    path = inspected.address.removeprefix("unix:")
    assert top("--once", KVSERVICE_UNIX_SOCKET=path).exit_code == 0


def test_what_cannot_be_done_is_said_in_a_line(tmp_path: Path) -> None:
    refusals = {
        ("--once",): (1, "no answer from unix:"),
        ("--json",): (2, "--json needs --once"),
        (): (2, "standard output is not a terminal"),
        ("--once", "--sort", "colour"): (2, "one of method"),
        ("--interval", "0"): (2, "--interval"),
    }
    with each_row() as row:
        for arguments, (status, said) in refusals.items():
            with row(arguments):
                refused = top(*arguments, KVSERVICE_UNIX_SOCKET=f"{tmp_path}/none.sock")
                assert isinstance(refused.exception, SystemExit)
                assert refused.exit_code == status
                assert said in refused.stderr
                assert refused.stdout == ""


def test_without_any_address_it_asks_for_one() -> None:
    refused = top("--once", KVSERVICE_UNIX_SOCKET="", KVSERVICE_TCP_ADDRESS="")
    assert refused.exit_code == 2
    assert "--address is needed" in refused.stderr


def test_it_is_a_command_of_the_program(inspected: Inspected) -> None:
    """The other tests run it in their own process."""
    command = [sys.executable, "-P", "-m", "kvservice", "top", "--once", "--json", "--address", inspected.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["pool"]["num_blocks"] == 100
