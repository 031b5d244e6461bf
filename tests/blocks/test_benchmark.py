"""The benchmark of the block manager, as its command shows it. tests/test_cli.py reads its numbers."""

from __future__ import annotations

from click.testing import CliRunner

from kvservice.cli import main


def test_the_benchmark_shows_a_table() -> None:
    shown = CliRunner().invoke(main, ["bench", "blocks", "--num-blocks", "2000", "--quick"], env={"COLUMNS": "160"})
    assert shown.exit_code == 0, shown.output
    assert "fork a sequence" in shown.output
