"""`kvservice top`: it prints one snapshot, or runs the terminal application."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass

import rich.table
from rich.console import Console
from rich.text import Text

from kvservice import plain_json
from kvservice.auth.client import ClientCredentials
from kvservice.environment import prepare_grpc

prepare_grpc()

from kvservice.top.columns import SORT_KEYS, TABLES, Table  # noqa: E402  the environment must be set first
from kvservice.top.source import Source, to_json  # noqa: E402
from kvservice.top.summary import summary  # noqa: E402
from kvservice.v1.inspect_pb2 import Snapshot  # noqa: E402

__all__ = ["SORT_KEYS", "Source", "TopOptions", "run"]

# ---- printing of one snapshot, as tables for people or as JSON for scripts


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


# ---- the command


@dataclass(frozen=True)
class TopOptions:
    address: str
    interval_s: float
    once: bool
    as_json: bool
    sort_key: str
    search: str
    credentials: ClientCredentials


def run(options: TopOptions) -> None:
    """Run until the user quits. Raises KVServiceError if no daemon answers at the start."""
    asyncio.run(_run(options))


async def _run(options: TopOptions) -> None:
    async with Source(options.address, options.credentials) as source:
        snapshot = await source.first_snapshot(options.search)
        if options.as_json:
            print_json(snapshot)
        elif options.once:
            print_tables(snapshot, options.address, options.sort_key)
        else:
            from kvservice.top.app import TopApp

            app = TopApp(source, snapshot, options.interval_s, options.sort_key, options.search)
            for number in (signal.SIGTERM, signal.SIGHUP):
                asyncio.get_running_loop().add_signal_handler(number, app.exit)
            await app.run_async()
