"""The lines of the summary about what lies below the pool and the block store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.columns import Columns
from rich.text import Text

from kvservice.top import format as fmt
from kvservice.v1.inspect_pb2 import SavedSnapshot, Snapshot, SpillSnapshot, TierSnapshot

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
