"""The ratios of the benchmark of the disk tier."""

from __future__ import annotations

from kvservice.bench import disk


def test_ratios_are_those_of_each_round() -> None:
    """The better way of fio counts in each round."""
    speeds = {f"fio_{engine}_{what}": [2.0, 1.0, 4.0] for engine in disk.ENGINES for what in ("read", "write")}
    speeds |= {"read": [1.0, 1.0, 1.0], "write": [2.0, 2.0, 2.0], "fio_psync_read": [1.0, 2.0, 5.0]}
    figures = disk.figures(speeds)
    assert (figures["read_of_fio"], figures["write_of_fio"]) == (0.5, 1.0)
    assert figures["fio_psync_read_bytes_per_s"] == 2.0
