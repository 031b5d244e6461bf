"""A plan as tables, or as one JSON object."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kvservice.planning.plan import Plan, TierPlan


def to_json(plan: Plan) -> dict[str, Any]:
    return asdict(plan)


def render(plan: Plan, console: Console) -> None:
    facts = Table("what", "figure", title_justify="left", show_header=False)
    for what, figure in _facts(plan):
        facts.add_row(what, figure)
    console.print(facts)
    tiers = Table(
        title="Tiers, each by itself; times in ms of 1,000 tokens",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        title_justify="left",
    )
    tiers.add_column("tier", no_wrap=True)
    for heading in ("GiB", "blocks", "tokens", "sessions", "GB/s", "load", "compute", "found", "gain"):
        tiers.add_column(heading, justify="right", no_wrap=True)
    for tier in plan.tiers:
        tiers.add_row(tier.name, *_figures(tier))
    console.print(tiers)
    for line in (*plan.notes, *plan.commands):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _facts(plan: Plan) -> list[tuple[str, str]]:
    facts = [
        ("K/V of a token", f"{plan.token_bytes:,} bytes"),
        (f"a block of {plan.layout.block_size} tokens", f"{plan.block_bytes:,} bytes"),
        ("weights", f"{plan.weights_gib:.1f} GiB"),
        ("prompt, session (mean)", f"{plan.prompt_tokens:,} tokens, {plan.session_tokens:,} tokens"),
        ("prefill", f"{plan.prefill_tokens_per_s:,.0f} tokens/s"),
        ("break-even bandwidth", f"{plan.break_even_gb_per_s:.2f} GB/s: below it computing again is faster"),
    ]
    if plan.unbounded_share is not None:
        facts.append(("reuse in the trace", f"{plan.unbounded_share:.1%} of the prompt tokens, if nothing is evicted"))
        facts.append(("capacity for 95 % of it", f"{plan.needed_gib:,.0f} GiB"))
    return facts


def _figures(tier: TierPlan) -> list[str]:
    shares = ["" if share is None else f"{share:.1%}" for share in (tier.hit_share, tier.gained_share)]
    speed = "" if tier.gb_per_s is None else f"{tier.gb_per_s:g}"
    counts = [short(number) for number in (tier.gib, tier.blocks, tier.tokens, round(tier.sessions, 1))]
    return [*counts, speed, f"{tier.load_ms:.1f}", f"{tier.recompute_ms:.1f}", *shares]


def short(number: float) -> str:
    """Return a number with three or four digits: 57k, 16.4M."""
    for unit, size, least in (("G", 1e9, 1e9), ("M", 1e6, 1e6), ("k", 1e3, 1e4)):
        if number >= least:
            return f"{number / size:.3g}{unit}"
    return f"{number:.4g}"
