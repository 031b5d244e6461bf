"""Metrics of restarts: of reports, and of a daemon that is killed."""

from __future__ import annotations

import os
import signal

import numpy as np
from scraping import POOL, Samples, by_label, scrape_until, value

from kvservice.client import KVClient
from kvservice.kept import RestartReport
from kvservice.launch import Daemon
from kvservice.metrics import restart_metrics


def samples_of(report: RestartReport) -> Samples:
    found = (sample for family in restart_metrics(report) for sample in family.samples)
    return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in found}


def test_all_series_exist_before_the_first_restart() -> None:
    """An increase from 0 to 1 can be seen only if there was a 0."""
    samples = samples_of(RestartReport())
    assert value(samples, "kvservice_kept") == 0
    assert by_label(samples, "kvservice_last_start", "outcome") == {"first_start": 1, "taken_over": 0, "refused": 0}
    restarts = by_label(samples, "kvservice_restarts_total", "cause")
    assert restarts == {"signal": 0, "status": 0, "device_fault": 0, "upgrade": 0}
    assert value(samples, "kvservice_restart_lost_sequences_total") == 0


def test_a_report_in_metrics() -> None:
    report = RestartReport("taken over", True, "signal 9", "", 13, 1.5, 0.25).to_json()
    report["kept"] |= {"sessions": 1, "sequences": 2, "cached_blocks": 3}
    report["lost"] |= {"sequences": 4, "steps": 5}
    report["totals"] |= {"signal": 6, "upgrade": 7, "lost_sequences": 9}
    samples = samples_of(RestartReport.from_json(report))
    assert value(samples, "kvservice_kept") == 1
    assert value(samples, "kvservice_last_start", outcome="taken_over") == 1
    assert value(samples, "kvservice_restarts_total", cause="signal") == 6
    assert value(samples, "kvservice_restarts_total", cause="upgrade") == 7
    assert value(samples, "kvservice_last_restart_down_seconds") == 1.5
    assert value(samples, "kvservice_last_restart_take_over_seconds") == 0.25
    counts = by_label(samples, "kvservice_restart_kept", "what")
    assert (counts["sessions"], counts["sequences"], counts["cached_blocks"]) == (1, 2, 3)
    assert by_label(samples, "kvservice_restart_lost", "what") == {"sequences": 4, "steps": 5, "schedulers": 0}
    assert value(samples, "kvservice_restart_lost_sequences_total") == 9
    refused = samples_of(RestartReport("refused"))
    assert value(refused, "kvservice_last_start", outcome="refused") == 1


def test_a_daemon_that_is_killed_says_what_it_took_over(free_port: int) -> None:
    options = POOL | {"http_address": f"127.0.0.1:{free_port}", "keeper": True}
    with Daemon(**options) as daemon, KVClient(daemon.address, transport="inline") as client:
        with client.session("writer") as kv:
            sequence = kv.allocate(range(10))
            tensor = np.zeros((2, 10, 1, 32), np.float32)
            kv.open_step([sequence]).write(tensor, tensor)
            for number in (1, 2):
                os.kill(daemon.daemon_pid(), signal.SIGKILL)
                kv.append([sequence], [number])
                samples = scrape_until(free_port, lambda found: restarts(found) >= number)  # noqa: B023
                assert restarts(samples) == number
        assert value(samples, "kvservice_kept") == 1
        assert value(samples, "kvservice_last_start", outcome="taken_over") == 1
        counts = by_label(samples, "kvservice_restart_kept", "what")
        assert (counts["sessions"], counts["sequences"], counts["cached_blocks"]) == (1, 1, 0)
        assert by_label(samples, "kvservice_restart_lost", "what") == {"sequences": 0, "steps": 1, "schedulers": 0}
        down_s = value(samples, "kvservice_last_restart_down_seconds")
        assert 0 < value(samples, "kvservice_last_restart_take_over_seconds") < down_s


def restarts(samples: Samples) -> float:
    return value(samples, "kvservice_restarts_total", cause="signal")
