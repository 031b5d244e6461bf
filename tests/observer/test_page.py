"""The page in a browser, over pools with synthetic calls: its contents, selection, search and updates."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from chromium import OpenPage, Page
from http_app import serving
from page_pool import FIRST_SEQUENCE, SAMPLES, STATES, PagePool, count_states
from selenium.webdriver.common.keys import Keys

import kvservice
from kvservice.kept import RestartReport
from kvservice.observer.web_api import MAX_STREAMS, HttpOptions, Refusals, make_app
from kvservice.store import EngineFigures

pytestmark = pytest.mark.slow

NUM_BLOCKS = 512
# Shorter than one second, to keep the tests quick.
INTERVAL_S = 0.2
MAP = "#pool > .cells"
SWAP_MAP = "#pool .swap .cells"
# As if another tab covered the page, or uncovered it.
HIDE = """[
  Object.defineProperty(document, "hidden", {value: arguments[0], configurable: true}),
  document.dispatchEvent(new Event("visibilitychange")),
]"""


async def no_metrics() -> tuple[bytes, str]:
    return b"", "text/plain"


@contextmanager
def serve(pool: PagePool, port: int = 0) -> Iterator[int]:
    app = make_app(pool.views, HttpOptions(loopback=True), no_metrics, Refusals(), INTERVAL_S)
    with serving(app, port) as running:
        yield running


@pytest.fixture
def pool() -> PagePool:
    return PagePool(NUM_BLOCKS, 128, 24)


@pytest.fixture
def port(pool: PagePool) -> Iterator[int]:
    with serve(pool) as running:
        yield running


@pytest.fixture(scope="module")
def million() -> Iterator[tuple[PagePool, int]]:
    pool = PagePool(1_000_000, 60_000, 24)
    with serve(pool) as running:
        yield pool, running


def rows(page: Page, table: str) -> list[list[str]]:
    cells = "[...document.querySelectorAll(arguments[0])].map((row) => [...row.cells].map((cell) => cell.innerText))"
    return list(page.js(cells, f"{table} tbody tr"))


def test_what_the_pool_holds(pool: PagePool, port: int, open_page: OpenPage) -> None:
    page = open_page(port)
    assert page.texts("#pool > .legend .number") == [str(count) for count in count_states(pool.states())]
    assert page.texts("#pool .swap .number") == ["86", "42"]
    assert "512 blocks of 16 tokens" in page.text("#pool .note")
    assert page.text("#shape") == f"{kvservice.__version__} · cpu · 32 layers \u00d7 8 KV heads \u00d7 128 · bfloat16"
    assert page.text("#status-text") == "Live"
    figures = dict(zip(page.texts("#figures dt"), page.texts("#figures dd"), strict=True))
    assert (figures["Sequences"], figures["Sessions"]) == ("24 + 1 swapped", "4")
    assert figures["Lane calls/s"] == "52.3K"


def report(
    *values: Any, kept: dict[str, int] | None = None, lost: dict[str, int] | None = None, **more: Any
) -> RestartReport:
    json = RestartReport(*values, **more).to_json()
    return RestartReport.from_json(json | {"kept": json["kept"] | (kept or {}), "lost": json["lost"] | (lost or {})})


REPORTS = {
    "nothing is kept: the memory ends with the process of the daemon": (report(), "good"),
    "after signal 9: took over 12 sessions in 0.00 s, down 1.1 s; lost nothing": (
        report("taken over", True, "signal 9", num_restarts=3, kept={"sessions": 12}, down_s=1.14),
        "good",
    ),
    "after upgrade: took over an empty pool in 0.00 s, down 0.0 s; lost 1 sequence": (
        report("taken over", True, "upgrade", num_restarts=1, lost={"sequences": 1}),
        "bad",
    ),
    "after signal 9: started empty, as the kept state was refused: block_size was 16, is 32": (
        report("refused", True, "signal 9", "block_size was 16, is 32", num_restarts=1),
        "bad",
    ),
}


def test_a_line_says_what_the_daemon_took_over(pool: PagePool, port: int, open_page: OpenPage) -> None:
    times = {0: "nothing", 1: "Restarted once, last ", 3: "Restarted 3 times, last "}
    for text, (taken_over, state) in REPORTS.items():
        pool.reader.restart = taken_over
        page = open_page(port)
        page.wait_for_text("#restart", text)
        assert page.js("document.querySelector('#restart').dataset.state") == state, text
        assert page.text("#restart").startswith(times[taken_over.num_restarts])


def test_a_first_start_has_no_line(pool: PagePool, port: int, open_page: OpenPage) -> None:
    pool.reader.restart = RestartReport(is_kept=True)
    assert open_page(port).js("document.querySelector('#restart').hidden") is True


def test_every_block_is_a_cell_in_the_colour_of_its_state(pool: PagePool, port: int, open_page: OpenPage) -> None:
    grid = "document.querySelector(arguments[0] + ' .grid')"
    for scheme in ("light", "dark"):
        page = open_page(port, prefers_color_scheme=scheme)
        columns, lines = (int(page.js(f"{grid}.getAttribute('aria-{name}count')", MAP)) for name in ("col", "row"))
        assert NUM_BLOCKS <= columns * lines < NUM_BLOCKS + columns
        colours = {state: (*page.colour("hole" if state == "free" else state), 255) for state in STATES}
        expected = [colours[state] for state in pool.states()]
        assert page.pixels(MAP)[:NUM_BLOCKS] == expected, scheme


def test_the_tables(pool: PagePool, port: int, open_page: OpenPage) -> None:
    page = open_page(port)
    sequences = rows(page, "#sequences")
    held = {str(sequence_id): str(len(pool.block_table(sequence_id))) for sequence_id in pool.sequence_ids()}
    assert {row[0]: row[4] for row in sequences} == held
    assert [int(row[4]) for row in sequences] == sorted((int(blocks) for blocks in held.values()), reverse=True)
    assert [row[:3] for row in rows(page, "#sessions")] == [
        ["chat-eu", "\N{EN DASH}", "attached"],
        ["chat-us", "acme", "attached"],
        ["batch", "acme", "waiting"],
        ["4", "acme", "attached"],
    ]
    calls = {row[0]: row[1:] for row in rows(page, "#calls")}
    assert calls["append"][0] == "450"
    assert calls["swap_out"][1:3] == ["\N{EN DASH}", "\N{EN DASH}"]


def test_a_block_is_chosen_with_the_pointer(pool: PagePool, port: int, open_page: OpenPage) -> None:
    page = open_page(port)
    block = pool.first_of("shared")
    page.click_cell(MAP, block)
    page.wait_for_text("#chosen", "shared: held by several sequences")
    assert page.text("#detail-title") == f"Block {block}"
    facts = dict(zip(page.texts("#detail dt"), page.texts("#detail dd"), strict=True))
    holders = pool.holders(block)
    assert {row[0] for row in rows(page, "#detail")} == {str(sequence_id) for sequence_id in holders}
    chain_hash = pool.manager.device.hashes[block]
    assert chain_hash is not None
    assert facts == {"References": str(len(holders)), "Taken": "3 d 5 h ago", "Hash": chain_hash.hex()}
    assert page.js("location.hash") == f"#block/device/{block}"
    page.click("#detail button.quiet")
    page.wait_for_text("#detail-title", "Nothing chosen")


def test_a_block_is_chosen_with_the_keyboard(pool: PagePool, port: int, open_page: OpenPage) -> None:
    page = open_page(port)
    page.js(f"document.querySelector('{MAP} .grid').focus()")
    columns = int(page.js(f"document.querySelector('{MAP} .grid').getAttribute('aria-colcount')"))
    moves = [
        (Keys.ARROW_RIGHT, 1),
        (Keys.ARROW_DOWN, 1 + columns),
        (Keys.END, 2 * columns - 1),
        (Keys.ARROW_RIGHT, 2 * columns),
        (Keys.ARROW_UP, columns),
        (Keys.ARROW_LEFT, columns - 1),
        (Keys.HOME, 0),
        (Keys.ARROW_UP, 0),
        (Keys.PAGE_DOWN, 8 * columns),
    ]
    active = f"document.getElementById(document.querySelector('{MAP} .grid').getAttribute('aria-activedescendant'))"
    for key, block in moves:
        page.press(key)
        assert page.js(f"{active}.getAttribute('aria-label')") == f"Block {block}: {pool.states()[block]}"
        assert page.js(f"{active}.getAttribute('aria-colindex')") == str(block % columns + 1)
    page.press(Keys.ENTER)
    page.wait_for_text("#detail-title", f"Block {8 * columns}")
    assert page.js(f"document.activeElement.matches('{MAP} .grid')")
    page.wait(f"{active}.getAttribute('aria-selected') === 'true'")


def test_a_sequence_shows_its_table_and_only_its_blocks(pool: PagePool, port: int, open_page: OpenPage) -> None:
    page = open_page(port)
    page.click(f"#sequences button[aria-label='Sequence {FIRST_SEQUENCE + 1}']")
    table = pool.block_table(FIRST_SEQUENCE + 1)
    page.wait_for_text("#detail", f"{len(table)}, in ")
    assert page.text("#detail-title") == f"Sequence {FIRST_SEQUENCE + 1}"
    assert from_ranges(page.text("#detail .ids")) == table
    shown = {block for block, (*_, opacity) in enumerate(page.pixels(MAP)) if opacity == 255}
    assert shown == set(table)
    assert page.js("document.querySelector('#sequences [aria-current=true] th').innerText") == str(FIRST_SEQUENCE + 1)
    page.click_cell("#detail .cells", 2)
    page.wait_for_text("#detail-title", f"Block {table[2]}")
    assert page.js("document.querySelector('[aria-current]')") is None


def from_ranges(text: str) -> list[int]:
    """Return the numbers in ranges like "17–20, 3, 90–88"."""
    ids: list[int] = []
    for run in text.split(", "):
        first, _, last = run.partition("\N{EN DASH}")
        step = 1 if not last or int(first) <= int(last) else -1
        ids += range(int(first), int(last or first) + step, step)
    return ids


def test_a_swapped_sequence_is_shown_in_the_swap_tier(port: int, open_page: OpenPage) -> None:
    page = open_page(port, f"#sequence/1/{FIRST_SEQUENCE + 24}")
    page.wait_for_text("#chosen", "42 swapped")
    swap = page.pixels(SWAP_MAP)
    assert set(swap[:42]) == {(*page.colour("swapped"), 255)}
    assert all(opacity < 255 for *_, opacity in swap[42:])
    assert all(opacity == 255 for *_, opacity in page.pixels(MAP)[:NUM_BLOCKS])
    page.click_cell(SWAP_MAP, 3)
    page.wait_for_text("#detail-title", "Swap block 3")
    page.wait_for_text("#chosen", "swapped: held by a sequence that is swapped out")


def test_a_choice_is_in_the_address(port: int, open_page: OpenPage) -> None:
    """Waiting for a title fails if it never comes."""
    page = open_page(port, "#block/device/7")
    page.wait_for_text("#detail-title", "Block 7")
    page.js("location.hash = '#block/device/8'")
    page.wait_for_text("#detail-title", "Block 8")
    page.driver.back()
    page.wait_for_text("#detail-title", "Block 7")
    page.js("location.hash = '#block/host/8'")
    page.wait_for_text("#detail-title", "Nothing chosen")


def test_the_search_finds_sequences_and_sessions(port: int, open_page: OpenPage) -> None:
    page = open_page(port)
    page.click("#query")
    page.press("batch")
    page.wait_for_text("#found", "6 sequences, 1 session")
    assert {row[1] for row in rows(page, "#sequences")} == {"batch"}
    assert [row[0] for row in rows(page, "#sessions")] == ["batch"]
    page.js("document.querySelector('#query').select()")
    page.press(str(FIRST_SEQUENCE + 5))
    page.wait_for_text("#found", "1 sequence, 0 sessions")
    assert [row[0] for row in rows(page, "#sequences")] == [str(FIRST_SEQUENCE + 5)]
    page.js("document.querySelector('#query').select()")
    page.press(Keys.DELETE)
    page.wait("document.querySelectorAll('#sequences tbody tr').length === 25")
    page.wait("document.querySelector('#found').innerText === ''")
    page.click("#sessions button[aria-label='Find session chat-eu']")
    page.wait_for_text("#found", "1 session")
    assert page.js("document.querySelector('#query').value") == "chat-eu"


def test_it_moves_with_the_pool(pool: PagePool, port: int, open_page: OpenPage) -> None:
    page = open_page(port, f"#sequence/1/{FIRST_SEQUENCE}")
    page.wait_for_text("#detail", "Block table")
    free = pool.num_free()
    length = len(pool.block_table(FIRST_SEQUENCE))
    pool.grow()
    block = pool.block_table(FIRST_SEQUENCE)[-1]
    page.wait_for_text("#pool > .legend li", str(free - 1))
    page.wait_for_text("#detail", f"{length + 1}, in ")
    assert page.pixels(MAP)[block] == (*page.colour("active"), 255)
    pool.drop(FIRST_SEQUENCE)
    page.wait_for_text("#chosen", f"session 1 has no sequence {FIRST_SEQUENCE}")
    pool.draining = True
    page.wait_for_text("#status-text", "Draining")
    acknowledge(page, "404")


def acknowledge(page: Page, *expected: str) -> None:
    """The console also reports refused requests and lost connections."""
    said = [entry["message"] for entry in page.driver.get_log("browser")]
    assert said
    assert [line for line in said if not any(text in line for text in expected)] == []


def test_the_focus_stays_while_rows_come_and_go(pool: PagePool, port: int, open_page: OpenPage) -> None:
    page = open_page(port)
    page.js(f"document.querySelector(\"#sequences [aria-label='Sequence {FIRST_SEQUENCE}']\").focus()")
    for _ in range(60):
        pool.grow()  # the first sequence becomes the longest
    pool.drop(FIRST_SEQUENCE + 3)
    page.wait(f"document.querySelector('#sequences tbody button').innerText === '{FIRST_SEQUENCE}'")
    page.wait("document.querySelectorAll('#sequences tbody tr').length === 24")
    assert page.js("document.activeElement.innerText") == str(FIRST_SEQUENCE)


@pytest.fixture
def port_with_history() -> Iterator[int]:
    with serve(PagePool(NUM_BLOCKS, 128, 24, num_samples=SAMPLES)) as running:
        yield running


def test_charts_begin_with_the_servers_history_and_go_on(port_with_history: int, open_page: OpenPage) -> None:
    page = open_page(port_with_history)
    assert page.texts("#charts h2") == [
        "Pool held by sequences",
        "Prefix cache hits",
        "Tokens computed per second",
        "Swapped per second",
        "99th percentile of calls",
    ]
    parts = page.js("[...document.querySelectorAll('#charts svg')].map((svg) => svg.querySelectorAll('path').length)")
    assert parts == [1, 1, 1, 2, 6]
    hits = page.js("document.querySelectorAll('.chart path')[1].getAttribute('d')")
    assert hits.count("M") == 2  # without lookups there is no line
    points = "document.querySelectorAll('.chart path')[1].getAttribute('d').match(/[ML]/g).length"
    assert page.js(points) == SAMPLES - 40
    page.wait(f"document.querySelectorAll('.chart path')[1].getAttribute('d') !== '{hits}'")
    assert page.js(points) == SAMPLES - 40


def test_engines_are_shown_once_there_are_any(pool: PagePool, port: int, open_page: OpenPage) -> None:
    page = open_page(port)
    hidden = "document.querySelector('#engines').hidden"
    assert page.js(hidden) is True
    pool.engine_table.write({pool.sessions[0].row.number: EngineFigures(2, 4000, 3000, 120, 1, 77, 3, 5)})
    page.wait("document.querySelectorAll('#engines tbody tr').length === 1")
    assert page.js(hidden) is False
    assert rows(page, "#engines") == [["chat-eu", "75%", "4,000", "2", "120", "1", "77", "3", "5"]]


def test_schedulers_are_shown_once_there_are_any(pool: PagePool, port: int, open_page: OpenPage) -> None:
    page = open_page(port)
    parts = "['#schedulers', '#scheduler-charts'].map((id) => document.querySelector(id).hidden)"
    assert page.js(parts) == [True, True]
    pool.schedule()
    page.wait("document.querySelectorAll('#schedulers tbody tr').length === 1")
    assert page.js(parts) == [False, False]
    dash = "\N{EN DASH}"
    assert rows(page, "#schedulers") == [["chat-eu", "1", "2", "0", "0", "0", "2", "20", "0%", "0", "0", dash]]
    figures = dict(zip(page.texts("#figures dt"), page.texts("#figures dd"), strict=True))
    assert (figures["Requests waiting"], figures["Running"], figures["Preempted/s"]) == ("1", "2", "0")
    assert (figures["First token, p99"], figures["Between tokens, p99"]) == ("199 ms", dash)
    assert page.texts("#scheduler-charts h2") == [
        "Requests",
        "99th percentile to the first token",
        "99th percentile between tokens",
    ]
    lines = "document.querySelectorAll('#scheduler-charts svg')[0].querySelectorAll('path').length"
    page.wait(f"{lines} === 2")


def test_tiers_are_shown_where_there_are_any(pool: PagePool, port: int, open_page: OpenPage) -> None:
    page = open_page(port)
    parts = "['#tiers', '#tier-charts'].map((id) => document.querySelector(id).hidden)"
    assert page.js(parts) == [True, True]
    pool.has_tiers = True
    page.wait("document.querySelectorAll('#tiers tbody tr').length === 4")
    assert page.js(parts) == [False, False]
    dash = "\N{EN DASH}"
    page.wait_for_text("#tiers", "120 MiB/s")
    assert rows(page, "#tiers") == [
        ["Pool", "open", "83.8%", "858 MiB of 1 GiB", "429", "66.7%", dash, dash, dash, dash],
        ["Block store", "open", "93.8%", "60 GiB of 64 GiB", "30,000", "80%", "400 MiB/s", "160 MiB/s", dash, dash],
        ["Disk", "open", "61.3%", "1.2 TiB of 1.95 TiB", "612,345", "75%", "120 MiB/s", "30 MiB/s", "310 µs", "0"],
        ["Mooncake", "open", dash, dash, dash, "20%", "0 B/s", "0 B/s", "2.1 ms", "0"],
    ]
    widths = [track * share / 100 for track, share in ((140, 83.79), (140, 93.75), (140, 61.25), (140, 0))]
    drawn = "[...document.querySelectorAll('#tiers .fill > span')].map((at) => at.getBoundingClientRect().width)"
    assert page.js(drawn) == pytest.approx(widths, abs=0.1)
    assert page.texts("#tier-charts h2") == ["Read from tiers per second", "Written to tiers per second"]
    page.wait("document.querySelectorAll('#tier-charts path').length === 4")
    notes = page.text("#tiers .notes")
    assert notes.startswith("Blocks that lookups missed first: 1,200 evicted, 7 in another namespace. The pool")
    assert "(24 MiB/s) below and loaded" in notes
    assert notes.endswith("Saved sessions: 3, 5 GiB of 16 GiB.")


def test_transfers_are_shown_where_there_are_engines(pool: PagePool, port: int, open_page: OpenPage) -> None:
    page = open_page(port)
    assert "Transfer engines" not in page.texts("#figures dt")
    pool.has_transfers = True
    page.wait_for_text("#figures", "300 MiB")
    figures = dict(zip(page.texts("#figures dt"), page.texts("#figures dd"), strict=True))
    assert (figures["Transfer engines"], figures["Transfer faults"]) == ("1 of 2", "3")
    assert (figures["Transfers out/s"], figures["In messages instead/s"]) == ("1 GiB", "5 MiB")
    assert figures["Transfers, p99"] == "19.9 ms"


def test_a_tier_that_is_not_open_stands_out(pool: PagePool, port: int, open_page: OpenPage) -> None:
    pool.has_tiers = True
    page = open_page(port)
    warn = f"rgb{page.colour('warn')}"
    state = "getComputedStyle(document.querySelector('#tiers tbody tr:last-child td:nth-child(2)')).color"
    faults = "getComputedStyle(document.querySelector('#tiers tbody tr:last-child td:last-child')).color"
    assert warn not in (page.js(state), page.js(faults))
    pool.mooncake_state = "suspended"
    page.wait_for_text("#tiers tbody tr:last-child", "suspended")
    assert [page.js(state), page.js(faults)] == [warn, warn]
    assert rows(page, "#tiers")[-1][-1] == "12"


def test_all_charts_show_the_time_below_the_pointer(port: int, open_page: OpenPage) -> None:
    page = open_page(port)
    assert page.js("document.querySelectorAll('.cross').length") == 0
    move = "document.querySelector('.chart svg').dispatchEvent(new PointerEvent(arguments[0], {clientX: 250}))"
    page.js(move, "pointermove")
    assert page.js("document.querySelectorAll('.cross').length") == 5
    page.js(move, "pointerleave")
    assert page.js("document.querySelectorAll('.cross').length") == 0


def test_a_million_blocks_are_cells_of_neighbours(million: tuple[PagePool, int], open_page: OpenPage) -> None:
    pool, port = million
    page = open_page(port)
    assert "1,000,000 blocks of 16 tokens, 2 MiB each, 245 to a cell, stacked by state" in page.text("#pool .note")
    columns, lines = (
        int(page.js(f"document.querySelector('{MAP} .grid').getAttribute('aria-{name}count')"))
        for name in ("col", "row")
    )
    num_cells = -(-1_000_000 // 245)
    assert num_cells <= columns * lines < num_cells + columns
    page.click_cell(MAP, 30)
    page.wait_for_text("#detail-title", "Blocks 7,350 to 7,594")
    page.wait("document.querySelector('#detail .grid').getAttribute('aria-rowcount')")
    states = pool.states()
    page.wait_for_text("#chosen", f"{states[7350:7595].count('active')} active")
    page.js("document.querySelector('#detail .grid').focus()")
    page.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ENTER)
    page.wait_for_text("#detail-title", "Block 7,352")
    page.wait_for_text("#chosen", states[7352])


def test_the_last_cell_may_be_smaller(million: tuple[PagePool, int], open_page: OpenPage) -> None:
    """Waiting for the title fails if it never comes."""
    _, port = million
    page = open_page(port)
    page.js(f"document.querySelector('{MAP} .grid').focus()")
    page.driver.execute_cdp_cmd(
        "Input.dispatchKeyEvent", {"type": "keyDown", "key": "End", "windowsVirtualKeyCode": 35, "modifiers": 2}
    )
    page.press(Keys.ENTER)
    page.wait_for_text("#detail-title", "Blocks 999,845 to 999,999")


def test_a_page_that_nobody_sees_listens_to_nothing(pool: PagePool, port: int, open_page: OpenPage) -> None:
    page = open_page(port)
    page.js(HIDE, True)
    page.wait("performance.now() > (window.hiddenAt ??= performance.now()) + 1000")  # requests in progress have ended
    computed = pool.num_readings
    page.wait("performance.now() > window.hiddenAt + 2500")
    assert pool.num_readings == computed
    page.js(HIDE, False)
    free = pool.num_free()
    pool.grow()
    page.wait_for_text("#pool > .legend li", str(free - 1))


def test_names_are_text(open_page: OpenPage) -> None:
    name = "<b onclick=alert(1)>&amp;</b>"
    with serve(PagePool(64, 0, 2, (name,))) as port:
        page = open_page(port, f"#sequence/1/{FIRST_SEQUENCE}")
        assert [row[0] for row in rows(page, "#sessions")] == [name]
        assert {row[1] for row in rows(page, "#sequences")} == {name}
        page.wait("document.querySelector('#detail dd')")
        assert page.text("#detail dd") == name
        page.leave()


def open_stream(port: int) -> socket.socket:
    """Open the stream of another page. Until the hidden page's stream has ended, there may be no place for it."""
    while True:
        other = socket.create_connection(("127.0.0.1", port), timeout=20)
        other.sendall(b"GET /api/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        if other.recv(1 << 16).startswith(b"HTTP/1.1 200"):
            return other
        other.close()


def test_a_refusal_is_shown(port: int, open_page: OpenPage) -> None:
    """Waiting for the texts fails if they never come."""
    page = open_page(port)
    page.js(HIDE, True)
    with contextlib.ExitStack() as others:
        for _ in range(MAX_STREAMS):
            others.enter_context(open_stream(port))
        page.js(HIDE, False)
        page.wait_for_text("#status-text", f"Refused: {MAX_STREAMS} pages are open")
        # A page that has heard nothing yet does not say that there are no sessions and calls.
        page.driver.refresh()
        page.wait_for_text("#status-text", "Refused")
        assert page.js("[...document.querySelectorAll('.none')].filter((text) => !text.hidden).length") == 0
    page.wait_for_text("#status-text", "Live")
    acknowledge(page, "503")


def test_the_token_is_given_once(open_page: OpenPage) -> None:
    token = "sesame-sesame-sesame"
    app = make_app(PagePool(64, 0, 2).views, HttpOptions(False, token), no_metrics, Refusals(), INTERVAL_S)
    with serving(app) as port:
        page = open_page(port, f"?token={token}")
        assert page.js("location.href") == f"http://127.0.0.1:{port}/"
        assert page.js("document.cookie") == ""
        page.open(port)
        assert len(rows(page, "#sequences")) == 2
        page.leave()


def test_a_lost_connection_is_shown_and_made_again(open_page: OpenPage, free_port: int) -> None:
    pool = PagePool(NUM_BLOCKS, 0, 4)
    with serve(pool, free_port):
        page = open_page(free_port)
        assert page.js(f"document.querySelector('{SWAP_MAP}').offsetParent") is None
    page.wait_for_text("#status-text", "Connection lost")
    pool.grow()
    with serve(pool, free_port):
        page.wait_for_text("#status-text", "Live")
        page.wait_for_text("#pool > .legend li", str(pool.num_free()))
        acknowledge(page, "ERR_")
        page.leave()
