"""The pool's counters and gauges, read when Prometheus asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvservice.blocks import BlocksStats


class PoolCollector(Collector):
    """Translates `BlocksStats`; costs the calls nothing. `memory_bytes`: what the device took at the start, by use."""

    def __init__(
        self,
        stats: Callable[[], BlocksStats],
        num_sessions: Callable[[], int],
        block_bytes: int,
        memory_bytes: Mapping[str, int],
    ) -> None:
        self._stats = stats
        self._num_sessions = num_sessions
        self._block_bytes = block_bytes
        self._memory_bytes = memory_bytes

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield from self._block_gauges(stats)
        gauges = {
            "kvservice_tokens": ("Tokens of all sequences.", stats.num_tokens),
            "kvservice_sessions": ("Open sessions.", self._num_sessions()),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value)
        sequences = GaugeMetricFamily("kvservice_sequences", "Sequences, by where their blocks are.", labels=["tier"])
        sequences.add_metric(["device"], stats.num_sequences - stats.num_swapped_sequences)
        sequences.add_metric(["swap"], stats.num_swapped_sequences)
        yield sequences
        counters = {
            "kvservice_prefix_cache_query_tokens": ("Prompt tokens looked up.", stats.prefix_query_tokens),
            "kvservice_prefix_cache_hit_tokens": ("Prompt tokens found computed.", stats.prefix_hit_tokens),
            "kvservice_cow_copies": ("Shared blocks copied because one holder wrote.", stats.cow_copies),
            "kvservice_evictions": ("Cached blocks given up for others.", stats.evictions),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(name, text, value)
        yield from self._swap_counters(stats)

    def _block_gauges(self, stats: BlocksStats) -> Iterator[Metric]:
        blocks = GaugeMetricFamily("kvservice_blocks", "Blocks, by state. A block is in one state.", labels=["state"])
        states = {
            "free": stats.num_free_blocks,
            "active": stats.num_active_blocks - stats.num_shared_blocks,
            "shared": stats.num_shared_blocks,
            "cached": stats.num_cached_blocks - stats.num_pinned_blocks,
            "pinned": stats.num_pinned_blocks,
            "swapped": stats.num_used_swap_blocks,
        }
        for state, value in states.items():
            blocks.add_metric([state], value)
        yield blocks
        usage = stats.num_active_blocks / stats.num_blocks
        yield GaugeMetricFamily("kvservice_block_usage_ratio", "Share of the pool that sequences hold.", usage)
        capacity = GaugeMetricFamily("kvservice_capacity_blocks", "Blocks that a tier has.", labels=["tier"])
        capacity.add_metric(["device"], stats.num_blocks)
        capacity.add_metric(["swap"], stats.num_swap_blocks)
        yield capacity
        yield GaugeMetricFamily("kvservice_block_size_bytes", "Bytes of one block, all layers.", self._block_bytes)
        memory = GaugeMetricFamily("kvservice_memory_bytes", "Memory taken at the start, by use.", labels=["use"])
        for use, value in self._memory_bytes.items():
            memory.add_metric([use], value)
        yield memory

    def _swap_counters(self, stats: BlocksStats) -> Iterator[Metric]:
        moved = {"out": stats.swapped_out_blocks, "in": stats.swapped_in_blocks}
        blocks = CounterMetricFamily("kvservice_swap_blocks", "Blocks moved between tiers.", labels=["direction"])
        for direction, value in moved.items():
            blocks.add_metric([direction], value)
        yield blocks
        num_bytes = CounterMetricFamily("kvservice_swap_bytes", "Bytes moved between tiers.", labels=["direction"])
        for direction, value in moved.items():
            num_bytes.add_metric([direction], value * self._block_bytes)
        yield num_bytes
