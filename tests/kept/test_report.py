"""The report of a restart: its words, its totals over restarts, and its way to the observer."""

from __future__ import annotations

import json

from kvservice.kept import KeptCounts, LostCounts, RestartReport, RestartTotals, count_restart

TAKEN_OVER, REFUSED = "taken over", "refused"
TAKEN = RestartReport(
    TAKEN_OVER,
    is_kept=True,
    ended="signal 9",
    num_restarts=3,
    down_s=1.14,
    take_over_s=0.214,
    kept=KeptCounts(sessions=12, sequences=340, cached_blocks=98_112, pins=1),
    lost=LostCounts(sequences=1),
)


def test_the_summary_says_what_was_kept_and_lost() -> None:
    assert TAKEN.summary == (
        "after signal 9: took over 12 sessions, 340 sequences, 98,112 cached blocks, 1 pin in 0.21 s, down 1.1 s; "
        "lost 1 sequence"
    )
    assert RestartReport(TAKEN_OVER, ended="upgrade").summary == (
        "after upgrade: took over an empty pool in 0.00 s, down 0.0 s; lost nothing"
    )


def test_the_summary_of_starts_without_a_take_over() -> None:
    rows = [
        (RestartReport(), "nothing is kept: the memory ends with the process of the daemon"),
        (RestartReport(is_kept=True), ""),
        (RestartReport(ended="status 1", down_s=2.0), "after status 1: started empty, as nothing was kept; down 2.0 s"),
        (
            RestartReport(REFUSED, is_kept=True, ended="upgrade", reason="block_size was 16, is 32"),
            "after upgrade: started empty, as the kept state was refused: block_size was 16, is 32",
        ),
        (
            RestartReport(TAKEN_OVER, is_kept=True),
            "after a crash: took over an empty pool in 0.00 s, down 0.0 s; lost nothing",
        ),
    ]
    assert [report.summary for report, _ in rows] == [summary for _, summary in rows]


def test_the_cause_has_few_values() -> None:
    rows = [
        (RestartReport(), ""),
        (RestartReport(TAKEN_OVER), "signal"),
        (RestartReport(TAKEN_OVER, ended="signal 11"), "signal"),
        (RestartReport(TAKEN_OVER, ended="status 1"), "status"),
        (RestartReport(REFUSED, ended="status 70"), "device_fault"),
        (RestartReport(TAKEN_OVER, ended="upgrade"), "upgrade"),
    ]
    assert [report.cause for report, _ in rows] == [cause for _, cause in rows]


def test_totals_go_on_over_restarts() -> None:
    section: dict[int, bytes] = {}
    assert count_restart(section, RestartReport(is_kept=True)).totals == RestartTotals()
    count_restart(section, TAKEN)
    count_restart(section, RestartReport(REFUSED, ended="signal 9", reason="the take-over failed 5 times"))
    last = count_restart(section, RestartReport(TAKEN_OVER, ended="upgrade", lost=LostCounts(sequences=4)))
    assert last.totals == RestartTotals(signal=2, upgrade=1, lost_sequences=5)
    assert last.num_restarts == 3
    assert last.totals.by_cause == {"signal": 2, "status": 0, "device_fault": 0, "upgrade": 1}
    # The totals of another version are read.
    section = {0: json.dumps({"signal": 5, "of_a_later_version": 1}).encode()}
    assert count_restart(section, TAKEN).totals == RestartTotals(signal=6, lost_sequences=1)


def test_the_keeper_counts_processes_that_never_served_and_dropped_states() -> None:
    early = ["signal 9", "status 1", "signal 11"]
    last = count_restart({}, RestartReport(TAKEN_OVER, ended="signal 9", num_restarts=4), early)
    assert (last.totals, last.num_restarts) == (RestartTotals(signal=3, status=1), 4)
    first = count_restart({}, RestartReport(is_kept=True, num_restarts=1), ["signal 9"])
    assert (first.totals, first.num_restarts) == (RestartTotals(signal=1), 1)
    assert count_restart({}, RestartReport(REFUSED, ended="status 70", num_restarts=7)).num_restarts == 7


def test_a_report_goes_to_the_observer_as_json() -> None:
    assert RestartReport.from_json(json.loads(json.dumps(TAKEN.to_json()))) == TAKEN
