"""The page in a headless Chromium. If Chromium is missing, it is installed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import debian_packages
import outliving
import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

PACKAGES = {"chromium": "chromium", "chromedriver": "chromium-driver"}
PATIENCE_S = 20.0
MAX_TAB_STOPS = 200
# Margin of the canvas around its cells, in pixels.
EDGE = 3
# Returns the pixels of a canvas. It reads a copy, because a browser warns about a canvas that is read repeatedly.
PIXELS = """
const [canvas, grid] = [...arguments].slice(0, 2).map((selector) => document.querySelector(selector));
const copy = Object.assign(document.createElement("canvas"), {width: canvas.width, height: canvas.height});
const context = copy.getContext("2d", {willReadFrequently: true});
context.drawImage(canvas, 0, 0);
const {data} = context.getImageData(0, 0, copy.width, copy.height);
const columns = Number(grid.getAttribute("aria-colcount"));
const edge = arguments[2];
const pitch = (canvas.clientWidth - 2 * edge) / columns;
return Array.from({length: columns * Number(grid.getAttribute("aria-rowcount"))}, (_, index) => {
  const [x, y] = [edge + (index % columns) * pitch + 1, edge + (Math.floor(index / columns) + 1) * pitch - 3];
  const at = 4 * (y * copy.width + x);
  return Array.from(data.subarray(at, at + 4));
});
"""


@pytest.fixture(scope="session")
def driver() -> Iterator[webdriver.Chrome]:
    debian_packages.require(PACKAGES)
    outliving.watch()
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # Chromium's sandbox does not work for root
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    running = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield running
    finally:
        running.quit()


class Page:
    """One page. Tests query it with JavaScript."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver
        self.origin = ""

    def open(self, port: int, hash_: str = "", *, width: int = 1280, height: int = 900, **features: str) -> None:
        """Open the page. `features` are CSS media features, e.g. prefers_color_scheme="dark". Waits for a frame."""
        self.origin = f"http://127.0.0.1:{port}"
        media = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.leave()
        metrics: dict[str, Any] = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
        for log in ("browser", "performance"):
            self.driver.get_log(log)
        self.driver.get(f"{self.origin}/{hash_}")
        self.wait("document.querySelector('#status').dataset.state === 'live'")

    def js(self, expression: str, *arguments: Any) -> Any:
        return self.driver.execute_script(f"return {expression}", *arguments)

    def wait(self, expression: str) -> Any:
        """Return the first true value of the expression."""
        waiting = WebDriverWait(self.driver, PATIENCE_S, poll_frequency=0.05)
        return waiting.until(lambda _: self.js(expression), f"never true: {expression}")

    def text(self, selector: str) -> str:
        return str(self.js("document.querySelector(arguments[0]).innerText", selector))

    def texts(self, selector: str) -> list[str]:
        return list(self.js("[...document.querySelectorAll(arguments[0])].map((found) => found.innerText)", selector))

    def wait_for_text(self, selector: str, text: str) -> None:
        self.wait(f"document.querySelector({json.dumps(selector)})?.innerText.includes({json.dumps(text)})")

    def press(self, *keys: str) -> None:
        """Press a key on the focused element."""
        ActionChains(self.driver).send_keys(*keys).perform()

    def click(self, selector: str) -> None:
        self.driver.find_element("css selector", selector).click()

    def click_cell(self, grid: str, index: int) -> None:
        """Click a cell of the grid below `grid` with the pointer."""
        x, y = self.cell_corner(grid, index)
        element = self.driver.find_element("css selector", f"{grid} .grid")
        self.js("arguments[0].scrollIntoView({block: 'center'})", element)
        width, height = self.js("[arguments[0].clientWidth, arguments[0].clientHeight]", element)
        middle = ActionChains(self.driver)
        middle.move_to_element_with_offset(element, x + 2 - width // 2, y + 2 - height // 2).click().perform()

    def cell_corner(self, grid: str, index: int) -> tuple[int, int]:
        columns = int(self.js("document.querySelector(arguments[0] + ' .grid').getAttribute('aria-colcount')", grid))
        width = self.js("document.querySelector(arguments[0] + ' canvas').clientWidth", grid)
        pitch = (width - 2 * EDGE) // columns
        return EDGE + index % columns * pitch, EDGE + index // columns * pitch

    def pixels(self, grid: str) -> list[tuple[int, int, int, int]]:
        """Return RGBA of each cell near its lower left corner, which every state except free fills."""
        found: list[list[int]] = self.driver.execute_script(PIXELS, f"{grid} canvas", f"{grid} .grid", EDGE)
        return [(red, green, blue, opacity) for red, green, blue, opacity in found]

    def colour(self, name: str) -> tuple[int, int, int]:
        """Return the RGB value of a custom property of the page's style."""
        text = self.js("getComputedStyle(document.documentElement).getPropertyValue('--' + arguments[0]).trim()", name)
        return int(text[1:3], 16), int(text[3:5], 16), int(text[5:7], 16)

    def tab_stops(self) -> list[str]:
        """Return the elements that Tab reaches, in order: ids, or an ancestor's id with the element's class or tag."""
        name = (
            "((at) => at === document.body ? '' : at.id || "
            "`${at.closest('[id]')?.id ?? ''} ${at.className || at.tagName.toLowerCase()}`)(document.activeElement)"
        )
        self.js("document.activeElement.blur()")
        stops: list[str] = []
        while len(stops) < MAX_TAB_STOPS:
            self.press(Keys.TAB)
            reached = self.js(name)
            if not reached:
                break
            stops.append(reached)
        return stops

    def tab_to(self, selector: str) -> None:
        """Move the focus to the element with the Tab key."""
        self.js("document.activeElement.blur()")
        for _ in range(MAX_TAB_STOPS):
            self.press(Keys.TAB)
            if self.js("document.activeElement.matches(arguments[0])", selector):
                return
        raise AssertionError(f"the Tab key does not reach {selector}")

    def accessible(self) -> list[dict[str, Any]]:
        """Return the nodes of the accessibility tree: role, name, and other properties by name."""
        nodes = self.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
        return [
            {
                "role": node.get("role", {}).get("value"),
                "name": node.get("name", {}).get("value", ""),
                **{found["name"]: found["value"].get("value") for found in node.get("properties", ())},
            }
            for node in nodes
            if not node["ignored"]
        ]

    def leave(self) -> None:
        self.driver.get("about:blank")

    def problems(self) -> list[str]:
        """Return console messages, and requests to other origins than the page's."""
        said = [entry["message"] for entry in self.driver.get_log("browser")]
        events = (json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance"))
        asked = [
            event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"
        ]
        assert any(url.startswith(f"{self.origin}/static/") for url in asked), "the log of requests is empty"
        return said + [url for url in asked if not url.startswith((f"{self.origin}/", "about:blank"))]


OpenPage = Callable[..., Page]


@pytest.fixture
def open_page(driver: webdriver.Chrome) -> Iterator[OpenPage]:
    """Open the page of a test. Before it is opened again, and at the end, the page must have no problems besides those
    that the test has read."""
    page = Page(driver)

    def check() -> None:
        page.leave()
        problems = page.problems()
        assert not problems, problems

    def open_(port: int, hash_: str = "", **options: Any) -> Page:
        if page.origin:
            check()
        page.open(port, hash_, **options)
        return page

    yield open_
    check()
