"""Printing of one snapshot, as tables for people or as JSON for scripts."""

from __future__ import annotations

import rich.table
from rich.console import Console
from rich.text import Text

from kvservice import plain_json
from kvservice.top.columns import TABLES, Table
from kvservice.top.source import to_json
from kvservice.top.summary import summary
from kvservice.v1.inspect_pb2 import Snapshot

_ROWS = 40
# Width of the output if it is not a terminal.
_WIDTH = 160


def print_json(snapshot: Snapshot) -> None:
    print(plain_json.dumps(to_json(snapshot)))


def print_tables(snapshot: Snapshot, address: str, sort_key: str) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    console.print(summary(snapshot, address))
    for table in TABLES:
        if not table.is_shown(snapshot):
            continue
        console.print()
        console.print(_rendered(table, snapshot, sort_key))


def _rendered(table: Table, snapshot: Snapshot, sort_key: str) -> rich.table.Table:
    rows = table.ordered(snapshot, sort_key, reverse=False)[:_ROWS]
    left_out = table.total(snapshot) - len(rows)
    rendered = rich.table.Table(
        box=None,
        title=Text(table.name, style="bold"),
        title_justify="left",
        caption=Text(f"and {left_out:,} more") if left_out else None,
        caption_justify="left",
    )
    for column in table.columns:
        rendered.add_column(column.title, justify=column.justify, max_width=column.width)
    for row in rows:
        rendered.add_row(*(column.cell(column.shown(row)) for column in table.columns))
    return rendered
