"""The command: it prints one snapshot, or runs the terminal application."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass

from kvservice.auth.client import ClientCredentials
from kvservice.top.once import print_json, print_tables
from kvservice.top.source import Source


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
