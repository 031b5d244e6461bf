"""`kvservice tenants`: what each tenant uses of its quotas."""

from __future__ import annotations

import asyncio

import click

from kvservice import plain_json
from kvservice.commands.connection import Presented, connection_options, failed
from kvservice.errors import KVServiceError


@click.command()
@click.option("--address", required=True, help="unix:///path/of.sock or host:port.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@connection_options
def tenants(address: str, as_json: bool, presented: Presented) -> None:
    """Show what the tenants of the daemon use, and their quotas.

    An observer sees its own tenant, an admin all of them, as does the daemon's user on the same host. Quotas are in the
    file of the option tenants.
    """
    from rich.console import Console
    from rich.table import Table

    from kvservice.health import door_of
    from kvservice.top.source import Source, to_json

    async def asked() -> list[dict[str, object]]:
        async with Source(door_of(address), presented.at(address)) as source:
            return [to_json(tenant) for tenant in (await source.first_snapshot()).tenants]

    try:
        found = asyncio.run(asked())
    except KVServiceError as error:
        raise failed(address, error) from None
    if as_json:
        click.echo(plain_json.dumps({"tenants": found}))
        return
    if not found:
        click.echo("The daemon has one tenant: see the option tenants.")
        return
    table = Table("tenant", "of", "used", "quota", "refused", box=None)
    for column in table.columns[2:]:
        column.justify = "right"
    for tenant in found:
        quotas: list[dict[str, float]] = tenant["quotas"]  # type: ignore[assignment]  # as the contract says
        for one in quotas:
            quota = "" if one["value"] is None else f"{one['value']:,g}"
            table.add_row(str(tenant["name"]), str(one["limit"]), f"{one['used']:,.0f}", quota, f"{one['refused']:,}")
    console = Console()
    (console if console.is_terminal else Console(width=100)).print(table)
