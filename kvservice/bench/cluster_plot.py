"""The chart of the simulated clusters: bars for each policy, grouped by the number of daemons."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from kvservice.bench.serve_plot import COLOURS, text

WIDTH, HEIGHT, LEFT, TOP, BAR = 960, 220, 60, 34, 26
# Space right of the bars, for the names of the policies.
LEGEND = 250
PANELS: tuple[tuple[str, Callable[[dict[str, Any]], float]], ...] = (
    (
        "share of prompt tokens found in a cache; line: bound of one cache with all the room",
        lambda row: row["hit_share"],
    ),
    ("most tokens computed by a daemon, over the mean", lambda row: row["imbalance"]),
    ("mean queueing delay, in units of random placement", lambda row: row["queued"]),
)


def write_plot(path: str, results: dict[str, Any]) -> None:
    """Write the chart. Raises OSError."""
    size = {"width": str(WIDTH), "height": str(HEIGHT * len(PANELS))}
    root = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "font-family": "sans-serif", **size})
    ElementTree.SubElement(root, "rect", {**size, "fill": "white"})
    for number, (title, value) in enumerate(PANELS):
        group = ElementTree.SubElement(root, "g", {"transform": f"translate(0 {number * HEIGHT})"})
        _draw(group, title, value, results["clusters"], with_bound=number == 0)
    Path(path).write_bytes(ElementTree.tostring(root))


def _draw(
    group: ElementTree.Element,
    title: str,
    value: Callable[[dict[str, Any]], float],
    clusters: list[dict[str, Any]],
    *,
    with_bound: bool,
) -> None:
    names = list(clusters[0]["policies"])
    heights = [[value(row) for row in _rows(cluster).values()] for cluster in clusters]
    bounds = [cluster["one_cache_share"] for cluster in clusters] if with_bound else []
    most = max([*(height for one in heights for height in one), *bounds, 1e-9])
    bottom, width = HEIGHT - 30, BAR * (len(names) + 2)
    text(group, (LEFT, TOP - 14), title, size=14)
    for tick in (0.0, 0.5, 1.0):
        y = bottom - tick * (bottom - TOP)
        _box(group, LEFT, y, width * len(clusters), 0.5, "#cccccc")
        text(group, (LEFT - 6, y + 4), f"{most * tick:.3g}", anchor="end")
    for place, (cluster, bars) in enumerate(zip(clusters, heights, strict=True)):
        left = LEFT + place * width + BAR
        for number, height in enumerate(bars):
            tall = height / most * (bottom - TOP)
            _box(group, left + number * BAR, bottom - tall, BAR - 3, tall, COLOURS[number % len(COLOURS)])
        if with_bound:
            _box(group, left, bottom - bounds[place] / most * (bottom - TOP), BAR * len(bars), 1.5, "#000000")
        label = f"{cluster['daemons']} daemon{'s' * (cluster['daemons'] > 1)}"
        text(group, (left + BAR * len(bars) / 2, bottom + 16), label, anchor="middle")
    for number, name in enumerate(names):
        _box(group, WIDTH - LEGEND, TOP + 20 * number, 12, 12, COLOURS[number % len(COLOURS)])
        text(group, (WIDTH - LEGEND + 18, TOP + 20 * number + 11), name)


def _rows(cluster: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the policies' figures, with the queueing delay in units of that of random placement."""
    unit = cluster["policies"]["random"]["queued_mean_s"] or 1.0
    return {name: row | {"queued": row["queued_mean_s"] / unit} for name, row in cluster["policies"].items()}


def _box(group: ElementTree.Element, x: float, y: float, width: float, height: float, colour: str) -> None:
    place = {"x": f"{x:.1f}", "y": f"{y:.1f}", "width": f"{width:.1f}", "height": f"{height:.1f}"}
    ElementTree.SubElement(group, "rect", {**place, "fill": colour})
