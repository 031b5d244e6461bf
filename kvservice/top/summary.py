"""The summary above the tables: bars of the pool, and rates per second."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvservice.top import format as fmt
from kvservice.v1.inspect_pb2 import (
    PoolSnapshot,
    Rates,
    SavedSnapshot,
    SchedulingSnapshot,
    Snapshot,
    SpillSnapshot,
    StoreSnapshot,
    TierSnapshot,
    TransferSnapshot,
)

# ---- the lines of the summary about what lies below the pool and the block store


# Styles of the states of a tier that need attention.
_TIER_STYLES = {"opening": "bold yellow", "suspended": "bold red", "failed": "bold red"}


def tier_lines(snapshot: Snapshot) -> list[Columns]:
    """Return nothing for what the daemon does not have."""
    spill = [_spill(snapshot.spill)] if snapshot.HasField("spill") else []
    saved = [_saved(snapshot.saved)] if snapshot.HasField("saved") else []
    return [*spill, *_tiers(snapshot.tiers), *saved]


def items(texts: Iterable[Text]) -> Columns:
    return Columns(list(texts), padding=(0, 2))


def _spill(spill: SpillSnapshot) -> Columns:
    pairs = (
        ("Pool to store", f"{fmt.size(spill.down_bytes_per_s)}/s"),
        ("back", f"{fmt.size(spill.up_bytes_per_s)}/s"),
        ("saved", fmt.count(spill.saved_blocks)),
        ("loaded", fmt.count(spill.loaded_blocks)),
        ("tokens found below", fmt.count(spill.hit_tokens)),
        ("waiting", fmt.count(spill.queued)),
    )
    return items(Text.assemble(f"{name} ", (value, "bold")) for name, value in pairs)


def _saved(saved: SavedSnapshot) -> Columns:
    pairs = (
        ("Saved sessions", fmt.count(saved.num_sessions)),
        ("bytes", f"{fmt.size(saved.used_bytes)} of {fmt.size(saved.capacity_bytes)}"),
        ("saved", fmt.count(saved.saved)),
        ("restored", fmt.count(saved.restored)),
        ("expired", fmt.count(saved.expired)),
    )
    faults = [_fault(name, getattr(saved, name)) for name in ("damaged", "errors") if getattr(saved, name)]
    return items([*(Text.assemble(f"{name} ", (value, "bold")) for name, value in pairs), *faults])


def _tiers(tiers: Sequence[TierSnapshot]) -> list[Columns]:
    """Return a line for each tier, with aligned texts. Counters of faults are shown if any tier has some."""
    faults = [name for name in ("errors", "corrupt", "suspensions") if any(getattr(tier, name) for tier in tiers)]
    lines = [[*_tier(tier), *(_fault(name, getattr(tier, name)) for name in faults)] for tier in tiers]
    for column in zip(*lines, strict=True):
        width = max(text.cell_len for text in column)
        for text in column:
            text.pad_right(width - text.cell_len)
    return [items(iter(line)) for line in lines]


def _tier(tier: TierSnapshot) -> Iterator[Text]:
    knows = bool(tier.capacity_bytes)
    used = f"{fmt.size(tier.used_bytes)} of {fmt.size(tier.capacity_bytes)}" if knows else "-"
    state = fmt.printable(tier.state)
    yield Text.assemble(fmt.printable(tier.name).capitalize(), " ", (used, "bold"))
    yield Text(state, style=_TIER_STYLES.get(state, ""))
    pairs = (
        ("values", fmt.count(tier.num_values) if knows else "-"),
        ("found", fmt.share(tier.hit_share if tier.HasField("hit_share") else None)),
        ("read", f"{fmt.size(tier.up_bytes_per_s)}/s"),
        ("written", f"{fmt.size(tier.down_bytes_per_s)}/s"),
        ("latency", fmt.latency(tier.latency_s or None)),
    )
    for name, value in pairs:
        yield Text.assemble(f"{name} ", (value, "bold"))


def _fault(name: str, number: int) -> Text:
    return Text.assemble(f"{name} ", (fmt.count(number), "bold red" if number else "bold"))


# ---- the summary


# States of blocks with their characters and colours. Without colours the characters distinguish the states.
_STATES = (
    ("active", "█", "green"),
    ("shared", "▓", "cyan"),
    ("pinned", "▚", "blue"),
    ("cached", "▒", "yellow"),
    ("free", "·", "default"),
)
_SWAPPED = ("swapped", "█", "magenta")
_FREE = _STATES[-1]
_Part = tuple[int, str, str]


class Bar:
    """A bar over the whole width, with one part per count, in its character and colour."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        self._parts = parts

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[Text]:
        bar, total, below = Text(no_wrap=True), sum(part[0] for part in self._parts), 0
        for number, sign, colour in self._parts:
            begin, below = below, below + number
            width = options.max_width * below // total - options.max_width * begin // total if total else 0
            bar.append(sign * width, style=colour)
        yield bar


def summary(snapshot: Snapshot, address: str) -> RenderableType:
    store = [_store(snapshot.store)] if snapshot.HasField("store") else []
    scheduling = [_scheduling(snapshot.scheduling)] if snapshot.HasField("scheduling") else []
    restart = [_restart(snapshot)] if snapshot.restart.summary else []
    pool = snapshot.pool
    memory: list[RenderableType] = [_bars(pool), _legend(pool), *store, *tier_lines(snapshot)]
    transfers = [_transfers(snapshot.transfers)] if snapshot.HasField("transfers") else []
    return Group(_heading(snapshot, address), *restart, *memory, _rates(snapshot.rates), *transfers, *scheduling)


def _heading(snapshot: Snapshot, address: str) -> Text:
    pool = snapshot.pool
    heading = Text.assemble(("kvservice ", "bold"), fmt.printable(address), f"  up {fmt.age(snapshot.uptime_s)}")
    for what in ("sessions", "sequences", "tokens", "lanes", "regions"):
        heading.append(f"  {what} {fmt.count(getattr(pool, what))}")
    if pool.regions:
        heading.append(f" ({fmt.size(pool.region_bytes)})")
    if pool.draining:
        heading.append("  draining", style="bold red")
    return heading


def _restart(snapshot: Snapshot) -> Text:
    """Return what the daemon took over at its start, in red if it refused the state or lost sequences."""
    report = snapshot.restart
    text = Text()
    if report.num_restarts:
        times = "once" if report.num_restarts == 1 else f"{report.num_restarts:,} times"
        text.append(f"Restarted {times}, last {fmt.age(snapshot.uptime_s)} ago ")
    bad = report.outcome == "refused" or report.lost.sequences
    return text.append(fmt.printable(report.summary), style="bold red" if bad else "")


def _bars(pool: PoolSnapshot) -> Table:
    held = pool.active_blocks + pool.shared_blocks
    device = [(getattr(pool, f"{state}_blocks"), sign, colour) for state, sign, colour in _STATES]
    swap = [(pool.used_swap_blocks, *_SWAPPED[1:]), (pool.num_swap_blocks - pool.used_swap_blocks, *_FREE[1:])]
    bars = Table.grid(padding=(0, 1), expand=True)
    bars.add_column()
    bars.add_column(ratio=1)
    bars.add_column(justify="right", no_wrap=True)
    for name, parts, used, total in (
        ("Pool", device, held, pool.num_blocks),
        ("Swap", swap, pool.used_swap_blocks, pool.num_swap_blocks),
    ):
        part = fmt.share(used / total if total else None)
        bars.add_row(Text(name, style="bold"), Bar(parts), f"{fmt.count(used)} of {fmt.count(total)} blocks, {part}")
    return bars


def _legend(pool: PoolSnapshot) -> Columns:
    counts = [(state, sign, colour, getattr(pool, f"{state}_blocks")) for state, sign, colour in _STATES]
    counts.append((*_SWAPPED, pool.used_swap_blocks))
    if pool.quarantined_blocks:
        counts.append(("in quarantine", "!", "bold red", pool.quarantined_blocks))
    return items(
        Text.assemble((sign, colour), f" {fmt.count(number)} {state}") for state, sign, colour, number in counts
    )


# Why blocks were missing: the fields of a snapshot with this and `_misses`.
_MISSED = ("evicted", "not_whole", "other_namespace", "never_stored")


def _store(store: StoreSnapshot) -> Columns:
    lookups = store.hits + store.misses
    missed = [(reason.replace("_", " "), getattr(store, f"{reason}_misses")) for reason in _MISSED]
    reasons = ", ".join(f"{fmt.count(number)} {reason}" for reason, number in missed if number)
    pairs = (
        ("Store", f"{fmt.size(store.used_bytes)} of {fmt.size(store.num_bytes)}"),
        *((("ready", fmt.size(store.ready_bytes)),) if 0 < store.ready_bytes < store.num_bytes else ()),
        ("blocks", fmt.count(store.blocks)),
        ("leased", fmt.count(store.leased)),
        ("being written", fmt.count(store.reserved)),
        ("in quarantine", fmt.count(store.quarantined)),
        ("found", fmt.share(store.hits / lookups if lookups else None)),
        *((("missed", reasons),) if reasons else ()),
    )
    return items(Text.assemble(f"{name} ", (value, "bold")) for name, value in pairs)


def _transfers(transfers: TransferSnapshot) -> Columns:
    """Return the figures of transfers, in red if some failed."""
    pairs = (
        ("Transfer engines", f"{fmt.count(transfers.engines)} of {fmt.count(transfers.regions)}"),
        ("memory", fmt.size(transfers.region_bytes)),
        ("in", f"{fmt.size(transfers.in_bytes_per_s)}/s"),
        ("out", f"{fmt.size(transfers.out_bytes_per_s)}/s"),
        ("in messages", f"{fmt.size(transfers.fallback_bytes_per_s)}/s"),
        ("running", fmt.count(transfers.running_in + transfers.running_out)),
        ("done", fmt.count(transfers.done_in + transfers.done_out)),
        ("p50", fmt.latency(transfers.p50_s if transfers.HasField("p50_s") else None)),
        ("p99", fmt.latency(transfers.p99_s if transfers.HasField("p99_s") else None)),
    )
    faults = {
        "failed": transfers.failed_in + transfers.failed_out,
        "engines not started": transfers.engine_failures,
        "damaged": transfers.damaged_blocks,
    }
    calm = (Text.assemble(f"{name} ", (value, "bold")) for name, value in pairs)
    alarming = (Text.assemble(f"{name} ", (fmt.count(number), "bold red")) for name, number in faults.items() if number)
    return items((*calm, *alarming))


def _scheduling(scheduling: SchedulingSnapshot) -> Columns:
    totals = scheduling.totals
    accepted = scheduling.accepted_share if scheduling.HasField("accepted_share") else None
    pairs = (
        ("Requests waiting", fmt.count(totals.waiting)),
        ("running", fmt.count(totals.running)),
        ("swapped", fmt.count(totals.swapped)),
        ("stalled", fmt.count(totals.stalled)),
        ("generated", f"{fmt.rate(scheduling.generated_tokens_per_s)} tokens/s"),
        ("finished", f"{fmt.rate(scheduling.finished_per_s)}/s"),
        ("preempted", f"{fmt.rate(scheduling.preemptions_per_s)}/s"),
        ("recomputed", f"{fmt.rate(scheduling.recomputed_tokens_per_s)} tokens/s"),
        ("first token p50", _latency(scheduling, "first_token_p50_s")),
        ("p99", _latency(scheduling, "first_token_p99_s")),
        ("between tokens p50", _latency(scheduling, "between_tokens_p50_s")),
        ("p99", _latency(scheduling, "between_tokens_p99_s")),
        *((("proposals right", fmt.share(accepted)),) if totals.proposed_tokens else ()),
    )
    return items(Text.assemble(f"{name} ", (value, "bold")) for name, value in pairs)


def _latency(scheduling: SchedulingSnapshot, name: str) -> str:
    return fmt.latency(getattr(scheduling, name) if scheduling.HasField(name) else None)


def _rates(rates: Rates) -> Columns:
    hits = fmt.share(rates.hit_share if rates.HasField("hit_share") else None)
    pairs = (
        ("computed", f"{fmt.rate(rates.computed_tokens)} tokens/s"),
        ("prefix hits", f"{hits} of {fmt.rate(rates.query_tokens)} tokens/s"),
        ("evicted", f"{fmt.rate(rates.evicted_blocks)}/s"),
        ("copied on write", f"{fmt.rate(rates.cow_copies)}/s"),
        ("swapped out", f"{fmt.size(rates.swapped_out_bytes)}/s"),
        ("swapped in", f"{fmt.size(rates.swapped_in_bytes)}/s"),
        ("calls", f"{fmt.rate(rates.calls)}/s"),
        ("by lane", f"{fmt.rate(rates.lane_calls)}/s"),
        ("errors", f"{fmt.rate(rates.errors)}/s"),
        ("out of blocks", f"{fmt.rate(rates.out_of_blocks)}/s"),
    )
    alarming = {"errors": rates.errors, "out of blocks": rates.out_of_blocks}
    return items(
        Text.assemble(f"{name} ", (value, "bold red" if alarming.get(name) else "bold")) for name, value in pairs
    )
