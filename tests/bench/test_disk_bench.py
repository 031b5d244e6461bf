"""The benchmark of the disk tier: the ways move the same bytes, and the table shows each of them."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from kvservice.bench import disk
from kvservice.bench.disk import ENGINES, SIZES, DiskBenchOptions, FioMissingError


@pytest.mark.skipif(shutil.which("fio") is None, reason="there is no fio")
def test_every_way_is_measured_on_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "MEMORY_BYTES", 16 << 20)
    results = disk.run(DiskBenchOptions(tmp_path, rounds=1, round_bytes=16 << 20, num_values=2000))
    ways = ("", *(f"fio_{engine}_" for engine in ENGINES))
    for size in SIZES:
        assert all(results[size][f"{way}{what}_bytes_per_s"] > 0 for way in ways for what in ("read", "write"))
    assert results["start"]["num_values"] >= 2000
    assert list(tmp_path.iterdir()) == []
    console = Console(file=io.StringIO(), width=200)
    disk.render(results, console)
    assert isinstance(console.file, io.StringIO)
    assert "start with 2,048 values" in console.file.getvalue()


def test_ratios_are_those_of_each_round() -> None:
    """The better way of fio counts in each round."""
    speeds = {f"fio_{engine}_{what}": [2.0, 1.0, 4.0] for engine in ENGINES for what in ("read", "write")}
    speeds |= {"read": [1.0, 1.0, 1.0], "write": [2.0, 2.0, 2.0], "fio_psync_read": [1.0, 2.0, 5.0]}
    figures = disk.figures(speeds)
    assert (figures["read_of_fio"], figures["write_of_fio"]) == (0.5, 1.0)
    assert figures["fio_psync_read_bytes_per_s"] == 2.0


def test_without_fio_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(FioMissingError, match="no fio"):
        disk.run(DiskBenchOptions(tmp_path))
