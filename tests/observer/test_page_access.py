"""Accessibility of the page: keyboard, screen reader, colour vision, any width, both themes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from chromium import OpenPage, Page
from each_row import each_row
from http_app import serving
from page_pool import FIRST_SEQUENCE, STATES, PagePool
from todays_part import ENTRIES

from kvservice.observer.web_api import HttpOptions, Refusals, make_app

pytestmark = pytest.mark.slow

SCHEMES = ["light", "dark"]
TONES = [f"tone-{number}" for number in range(6)]
# WCAG 2.2: 1.4.3 for text, 1.4.11 for graphics.
TEXT_CONTRAST, PAINT_CONTRAST = 4.5, 3.0
# CIE76 difference; 10 is clearly visible side by side. The shapes of blocks differ as well.
LEAST_DIFFERENCE = 14.0
# Machado, Oliveira and Fernandes (2009), severity 1, of linear RGB.
VISION = {
    "all colours": np.eye(3),
    "no red cones": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "no green cones": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "no blue cones": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = XYZ.sum(axis=1)


async def no_metrics() -> tuple[bytes, str]:
    return b"", "text/plain"


@pytest.fixture(scope="module")
def pool() -> PagePool:
    pool = PagePool(512, 128, 24)
    pool.schedule()
    pool.has_tiers = True
    return pool


@pytest.fixture(scope="module")
def port(pool: PagePool) -> Iterator[int]:
    with serving(make_app(pool.views, HttpOptions(loopback=True), no_metrics, Refusals(), 0.2)) as running:
        yield running


def linear(colour: tuple[int, int, int]) -> np.ndarray:
    values = np.array(colour) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(one: tuple[int, int, int], other: tuple[int, int, int]) -> float:
    dark, light = sorted(float(XYZ[1] @ linear(colour)) for colour in (one, other))
    return (light + 0.05) / (dark + 0.05)


def lab(rgb: np.ndarray) -> np.ndarray:
    scaled = XYZ @ rgb.clip(0, 1) / WHITE
    x, y, z = np.where(scaled > 0.008856, np.cbrt(scaled), 7.787 * scaled + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_contrast_is_reckoned_as_wcag_does() -> None:
    assert contrast((0, 0, 0), (255, 255, 255)) == pytest.approx(21)
    assert contrast((0x77, 0x77, 0x77), (255, 255, 255)) == pytest.approx(4.48, abs=0.005)


def test_colours_stand_out_in_both_themes(port: int, open_page: OpenPage) -> None:
    for scheme in SCHEMES:
        page = open_page(port, prefers_color_scheme=scheme)
        for name, ground in itertools.product(("ink", "soft", "accent", "warn"), ("panel", "ground")):
            assert contrast(page.colour(name), page.colour(ground)) >= TEXT_CONTRAST, (scheme, name, ground)
        for name in (*STATES, "swapped", "focus", *TONES):
            assert contrast(page.colour(name), page.colour("panel")) >= PAINT_CONTRAST, (scheme, name)


def test_states_differ_to_every_eye(port: int, open_page: OpenPage) -> None:
    for scheme in SCHEMES:
        page = open_page(port, prefers_color_scheme=scheme)
        colours = {state: linear(page.colour("empty" if state == "free" else state)) for state in STATES}
        for vision, matrix in VISION.items():
            seen = {state: lab(matrix @ colour) for state, colour in colours.items()}
            for one, other in itertools.combinations(STATES, 2):
                assert np.linalg.norm(seen[one] - seen[other]) >= LEAST_DIFFERENCE, (scheme, vision, one, other)


def test_states_differ_by_shape(port: int, open_page: OpenPage) -> None:
    page = open_page(port)
    # The swatches of the legend, reduced to the pixels in the colour of the state.
    shapes = page.driver.execute_script("""
        return [...document.querySelectorAll("#pool > .legend canvas")].map((canvas) => {
          const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          const own = Array.from(data.subarray(4 * canvas.width * (canvas.height - 2) + 4).subarray(0, 3)).join();
          return Array.from({length: data.length / 4}, (_, at) => data.subarray(4 * at, 4 * at + 3).join() === own);
        });""")
    assert len(shapes) == len(STATES) == len({tuple(shape) for shape in shapes})


def test_the_theme_is_the_readers(port: int, open_page: OpenPage) -> None:
    for scheme in SCHEMES:
        page = open_page(port, prefers_color_scheme=scheme)
        red, green, blue = page.colour("ground")
        assert page.js("getComputedStyle(document.body).backgroundColor") == f"rgb({red}, {green}, {blue})"
        assert (red + green + blue < 150) == (scheme == "dark")


def test_nothing_moves_for_who_wants_no_motion(port: int, open_page: OpenPage) -> None:
    moving = "document.getAnimations().length"
    assert open_page(port, prefers_reduced_motion="no-preference").js(moving) == 1
    assert open_page(port, prefers_reduced_motion="reduce").js(moving) == 0


def test_it_fits_any_width(port: int, open_page: OpenPage) -> None:
    """A run looks at a third of the pages."""
    outside = """[...document.querySelectorAll("body *")]
        .filter((at) => at.getBoundingClientRect().right > innerWidth + 1 && !at.closest(".scroll"))
        .map((at) => at.outerHTML.slice(0, 90))"""
    hashes = ("", f"#sequence/1/{FIRST_SEQUENCE}", "#block/device/3")
    pages = list(itertools.product((360, 520, 768, 1024, 1440, 2560), hashes))
    with each_row() as row:
        for width, hash_ in pages[ENTRIES]:
            with row(f"{width} {hash_}"):
                page = open_page(port, hash_, width=width)
                if hash_:
                    page.wait("document.querySelector('#detail dt')")
                assert page.js("document.documentElement.scrollWidth") <= width
                assert page.js(outside) == []


def test_the_keyboard_reaches_everything_once(port: int, open_page: OpenPage) -> None:
    stops = open_page(port).tab_stops()
    assert stops[:4] == [" skip", "query", "pool grid", "pool grid"]
    assert [stop for stop in stops if stop.startswith("pool")] == ["pool grid", "pool grid"]
    assert stops.count("sequences button") == 27
    assert stops.count("sessions button") == 4
    assert [stop for stop in stops if stop.endswith("scroll")] == [
        "tiers scroll",
        "sequences scroll",
        "sessions scroll",
        "schedulers scroll",
        "calls scroll",
    ]


def test_what_has_the_focus_is_marked(port: int, open_page: OpenPage) -> None:
    page = open_page(port)
    outline = "getComputedStyle(document.activeElement).outline"
    for selector in ("#pool .grid", "#sequences button", "#query", "#sequences .scroll"):
        page.tab_to(selector)
        assert "solid 2px" in page.js(outline), selector


def test_a_screen_reader_finds_names_and_roles(port: int, open_page: OpenPage) -> None:
    page = open_page(port, f"#sequence/1/{FIRST_SEQUENCE}")
    page.wait("document.querySelector('#detail .grid').getAttribute('aria-rowcount')")
    nodes = page.accessible()
    named = {"button", "searchbox", "grid", "gridcell", "image", "region", "table", "link", "heading", "search"}
    nameless = [node for node in nodes if node["role"] in named and not node["name"].strip()]
    assert [node for node in nameless if node["role"] != "search"] == []
    names = {role: [node["name"] for node in nodes if node["role"] == role] for role in named}
    assert names["grid"] == ["Map of the pool", "Map of the swap tier", f"Block table of sequence {FIRST_SEQUENCE}"]
    assert names["gridcell"][0].startswith("Block 0: ")
    assert names["searchbox"] == ["Find"]
    assert names["table"] == ["Tiers", "Sequences", "Sessions", "Schedulers", "Calls"]
    assert len(names["search"]) == 1
    assert [name.split(",")[0] for name in names["image"]] == page.texts(".chart h2")
    held = next(name for name in names["image"] if name.startswith("Pool held"))
    (now, least, most) = re.findall(r"held: now ([\d.]+)%, from ([\d.]+)% to ([\d.]+)%", held)[0]
    assert 0 < float(least) <= float(now) <= float(most) < 100
    roles = [node["role"] for node in nodes]
    assert {"main", "banner", "status", "columnheader", "rowheader"} <= set(roles)
    assert roles.count("columnheader") == 10 + 6 + 13 + 12 + 6


def test_headings_and_ids(port: int, open_page: OpenPage) -> None:
    page = open_page(port, "#block/device/3")
    page.wait("document.querySelector('#detail dt')")
    levels = page.js("[...document.querySelectorAll('h1, h2, h3')].map((at) => Number(at.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(later <= before + 1 for before, later in itertools.pairwise(levels))
    ids = page.js("[...document.querySelectorAll('[id]')].map((at) => at.id)")
    assert len(ids) == len(set(ids))
    assert page.js("document.documentElement.lang") == "en"
    named = "[...document.querySelectorAll('[aria-labelledby], [aria-describedby], [aria-activedescendant], [for]')]"
    referred = page.js(
        f"{named}.flatMap((at) => ['aria-labelledby', 'aria-describedby', 'aria-activedescendant', 'for']"
        ".map((name) => at.getAttribute(name))).filter((id) => id)"
    )
    assert referred
    assert set(referred) <= set(ids)


def test_what_is_chosen_is_said(pool: PagePool, port: int, open_page: OpenPage) -> None:
    page = open_page(port)
    said = live_texts(page)
    assert said["status-text"] == "Live"
    page.js(f"location.hash = '#block/device/{pool.first_of('active')}'")
    page.wait("document.querySelector('#chosen').innerText.startsWith('active')")
    assert live_texts(page)["chosen"] == "active: held by one sequence"


def live_texts(page: Page) -> dict[str, Any]:
    live = "[...document.querySelectorAll('[role=status], [aria-live]')].map((at) => [at.id, at.innerText])"
    return dict(page.js(live))
