"""Line charts as SVG: one panel below the other, each with lines over the same axis of seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

WIDTH, HEIGHT = 960, 300
LEFT, RIGHT, TOP, BOTTOM = 70, 330, 36, 40
TICKS = 5
# Okabe and Ito's colours, which colour-blind people can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")

# (seconds, value) points by the name of the line.
Lines = Mapping[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True)
class Panel:
    """A chart: its title, the meaning of its vertical axis, and its lines."""

    title: str
    meaning: str
    lines: Lines


def write_svg(path: str, panels: Sequence[Panel]) -> None:
    """Write the panels to a file. Raises OSError."""
    size = {"width": str(WIDTH), "height": str(HEIGHT * len(panels))}
    root = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "font-family": "sans-serif", **size})
    ElementTree.SubElement(root, "rect", {**size, "fill": "white"})
    for number, panel in enumerate(panels):
        _draw(ElementTree.SubElement(root, "g", {"transform": f"translate(0 {number * HEIGHT})"}), panel)
    Path(path).write_bytes(ElementTree.tostring(root))


def _draw(group: ElementTree.Element, panel: Panel) -> None:
    points = [point for line in panel.lines.values() for point in line]
    most_s, most = (max([point[axis] for point in points], default=0.0) or 1.0 for axis in (0, 1))
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def place(seconds: float, value: float) -> tuple[float, float]:
        return LEFT + seconds / most_s * (right - LEFT), bottom - value / most * (bottom - TOP)

    text(group, (LEFT, TOP - 14), panel.title, size=14)
    for tick in range(TICKS + 1):
        x, y = place(most_s * tick / TICKS, most * tick / TICKS)
        _line(group, [(LEFT, y), (right, y)], "#dddddd", 1)
        text(group, (LEFT - 6, y + 4), f"{most * tick / TICKS:.4g}", anchor="end")
        text(group, (x, bottom + 16), f"{most_s * tick / TICKS:.3g}", anchor="middle")
    text(group, ((LEFT + right) / 2, bottom + 32), f"seconds; vertical: {panel.meaning}", anchor="middle")
    for number, (name, line) in enumerate(panel.lines.items()):
        colour, y = COLOURS[number % len(COLOURS)], TOP + 18 * number
        _line(group, [place(*point) for point in line], colour, 2)
        _line(group, [(right + 12, y), (right + 32, y)], colour, 3)
        text(group, (right + 38, y + 4), name)


def _line(group: ElementTree.Element, points: Sequence[tuple[float, float]], colour: str, width: int) -> None:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    look = {"fill": "none", "stroke": colour, "stroke-width": str(width)}
    ElementTree.SubElement(group, "polyline", {"points": places, **look})


def text(
    group: ElementTree.Element, place: tuple[float, float], text: str, anchor: str = "start", size: int = 12
) -> None:
    """Add a text. `place` is its (x, y), `anchor` the end of the text that lies there."""
    position = {"x": f"{place[0]:.1f}", "y": f"{place[1]:.1f}", "text-anchor": anchor, "font-size": str(size)}
    ElementTree.SubElement(group, "text", position).text = text
