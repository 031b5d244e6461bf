"""Placing requests over 1, 8 and 64 daemons, simulated: hit share, balance and queueing of the client's placement
against simpler policies, perfect knowledge and bounds. The client's own code places; see cluster_model for the rest."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from kvservice.bench.cluster_bounds import everything_share, one_cache_share
from kvservice.bench.cluster_model import ClusterSimulation, PlacedOutcome, Service
from kvservice.bench.cluster_plot import write_plot
from kvservice.bench.cluster_policies import OURS, policies
from kvservice.bench.harness import table
from kvservice.client.cluster.placement import PlacementSettings
from kvservice.planning.trace import ConversationLoad, Trace, read_trace, synthetic_trace

__all__ = [
    "ClusterBenchOptions",
    "ClusterSimulation",
    "Service",
    "everything_share",
    "measure",
    "one_cache_share",
    "policies",
    "render",
    "run",
]

DAEMONS = (1, 8, 64)
# The number of daemons for which events come late.
DELAYED = 8
DELAYS_S = (0.0, 0.1, 1.0, 10.0, 60.0)
# The delay of events in the comparison of policies: the daemon gathers them for 5 ms.
DELAY_S = 0.01
# Conversations for each daemon of a synthetic trace, and their rate.
CONVERSATIONS, CONVERSATIONS_PER_S = 20, 0.05
# Blocks of 64 tokens of one daemon's cache in a synthetic trace, and of all daemons' together for a trace from a file.
SYNTHETIC_BLOCKS, FILE_BLOCKS = 512, 40_960


@dataclass(frozen=True)
class ClusterBenchOptions:
    """Options of `bench cluster`. `demand` is the tokens of all prompts a second over those that the engines compute a
    second: above 1 only hits keep up."""

    trace: str | None = None
    seed: int = 0
    demand: float = 1.5
    queue_weight: float = PlacementSettings.queue_weight
    plot: str | None = None
    quick: bool = False


def run(options: ClusterBenchOptions) -> dict[str, Any]:
    """Return the figures of each number of daemons, and those of later and later events. Raises
    InvalidArgumentError for a file that is not a trace."""
    settings = PlacementSettings(options.queue_weight)
    clusters = []
    counts = DAEMONS[: 2 if options.quick else 3]
    workloads = {num_daemons: workload(options, num_daemons) for num_daemons in counts}
    for num_daemons, (trace, service) in workloads.items():
        rows = {name: measure(trace, num_daemons, service, make) for name, make in policies(DELAY_S, settings).items()}
        clusters.append(
            {
                "daemons": num_daemons,
                "trace": trace.name,
                "requests": len(trace.requests),
                "input_tokens": trace.input_tokens,
                "blocks": service.num_blocks,
                "block_size": trace.block_size,
                "tokens_per_s": service.tokens_per_s,
                "one_cache_share": one_cache_share(trace, service.num_blocks * num_daemons),
                "everything_share": everything_share(trace),
                "policies": rows,
            }
        )
    trace, service = workloads[DELAYED]
    delays = {delay_s: measure(trace, DELAYED, service, policies(delay_s, settings)[OURS]) for delay_s in DELAYS_S}
    results = {"demand": options.demand, "clusters": clusters, "delays": delays}
    if options.plot is not None:
        write_plot(options.plot, results)
    return results


def workload(options: ClusterBenchOptions, num_daemons: int) -> tuple[Trace, Service]:
    """Return the trace and the daemons. A synthetic trace grows with the daemons; one from a file is the same for any
    number of them, with the same room and the same speed in all."""
    if options.trace is not None:
        trace, num_blocks = read_trace(options.trace), FILE_BLOCKS // num_daemons
    else:
        conversations = CONVERSATIONS * num_daemons // (2 if options.quick else 1)
        made = ConversationLoad(
            conversations, CONVERSATIONS_PER_S * num_daemons, num_system_prompts=8 + 4 * num_daemons
        )
        trace, num_blocks = synthetic_trace(made, options.seed), SYNTHETIC_BLOCKS
    speed = trace.input_tokens / trace.duration_s / num_daemons / options.demand
    return trace, Service(num_blocks, speed)


def measure(trace: Trace, num_daemons: int, service: Service, make: Any) -> dict[str, Any]:
    """Run a trace with one policy and return its figures."""
    simulation = ClusterSimulation(trace, num_daemons, service)
    served = simulation.run(make(simulation))
    return figures(trace, simulation, served)


def figures(trace: Trace, simulation: ClusterSimulation, served: list[PlacedOutcome]) -> dict[str, Any]:
    """Return the share of prompt tokens that were cached; the most tokens that a daemon has computed, over the mean;
    and the times in seconds that requests waited for their prefill to begin."""
    computed = [daemon.computed_tokens for daemon in simulation.daemons]
    queued = sorted(one.queued_s for one in served)
    return {
        "hit_share": sum(one.hit_tokens for one in served) / trace.input_tokens,
        "imbalance": max(computed) / statistics.fmean(computed),
        "queued_mean_s": statistics.fmean(queued),
        "queued_p50_s": statistics.median(queued),
        "queued_p99_s": queued[min(len(queued) - 1, len(queued) * 99 // 100)],
        "first_token_mean_s": statistics.fmean(one.first_token_s for one in served),
    }


def render(results: dict[str, Any], console: Console) -> None:
    for cluster in results["clusters"]:
        title = (
            f"{cluster['daemons']} daemons, {cluster['trace']}: {cluster['requests']} requests, "
            f"{cluster['input_tokens']} prompt tokens; {cluster['blocks']} blocks of {cluster['block_size']} and "
            f"{cluster['tokens_per_s']:.0f} tokens/s each"
        )
        shown = table(title, ["policy"], ["hit share", "max/mean computed", "queued s, mean", "p50", "p99"])
        for name, row in cluster["policies"].items():
            times = [f"{row[f'queued_{which}_s']:.3g}" for which in ("mean", "p50", "p99")]
            shown.add_row(name, f"{row['hit_share']:.3f}", f"{row['imbalance']:.2f}", *times)
        shown.add_row("bound: one cache of all the room", f"{cluster['one_cache_share']:.3f}")
        shown.add_row("bound: nothing evicted", f"{cluster['everything_share']:.3f}")
        console.print(shown)
    late = table(f"{DELAYED} daemons, events late", ["delay in s"], ["hit share", "queued s"])
    for delay_s, row in results["delays"].items():
        late.add_row(f"{delay_s:g}", f"{row['hit_share']:.3f}", f"{row['queued_mean_s']:.3g}")
    console.print(late)
