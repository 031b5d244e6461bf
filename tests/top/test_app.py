"""The application of `kvservice top`, driven by keys, with a real server."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from typing import Any

from inspected_pool import Inspected, add_scheduler, add_tiers, pool_in_use
from textual.widgets import DataTable
from top_screen import INTERVAL_S, SHORT, screen, shown_names, text_of, until


def played(scene: Callable[[Inspected], Coroutine[Any, Any, None]]) -> Callable[[Inspected], None]:
    """Turn a scene into a test."""

    def test(inspected: Inspected) -> None:
        asyncio.run(scene(inspected))

    test.__name__, test.__doc__ = scene.__name__, scene.__doc__
    return test


@played
async def test_it_shows_the_pool_and_who_holds_it(inspected: Inspected) -> None:
    async with screen(inspected) as (app, _):
        text = text_of(app)
        assert "50 of 100 blocks, 50.0 %" in text
        assert "5 of 20 blocks, 25.0 %" in text
        for state in ("40 active", "10 shared", "5 pinned", "15 cached", "30 free", "5 swapped"):
            assert state in text
        assert re.search(r"found 75\.0 %\s+missed 3 evicted, 1,200 never stored", text)
        assert "prefix hits 25.0 % of 1,000 tokens/s" in text
        assert "Calls: 3, by CALLS/s, down" in text
        assert re.search(r"append +6\.0 +120 µs +180 µs +900 +0", text)
        assert re.search(r"1 +chat +acme +30 +1,000 +1 +0 +10\.0 %", text)
        assert re.search(r"4611686018427387907 +3 +\[red\]evil�\[2J +5 +97 +87 +swap", text)
        assert "\x1b" not in text


@played
async def test_tiers_have_a_line_each_that_follows_them(inspected: Inspected) -> None:
    async with screen(inspected, (160, 60)) as (app, _):
        assert "Disk" not in text_of(app)
        add_tiers(inspected.snapshot)
        await until(lambda: re.search(r"Disk 1\.2 TiB of 2\.0 TiB *open *values 600,000 *found 63\.4 %", text_of(app)))
        mooncake = r"Mooncake - *suspended *values - *found -.*errors 12 *suspensions 3"
        await until(lambda: re.search(mooncake, text_of(app)))
        inspected.snapshot.tiers[0].state = "failed"
        await until(lambda: re.search(r"Disk .*failed *values", text_of(app)))


@played
async def test_it_follows_the_daemon(inspected: Inspected) -> None:
    async with screen(inspected) as (app, _):
        inspected.snapshot.pool.active_blocks = 60
        inspected.snapshot.sessions[1].blocks = 77
        inspected.snapshot.sessions.add(session_id=9, name="new", blocks=50)
        await until(lambda: shown_names(app) == ["batch", "new", "chat", "[red]evil�[2J"])
        assert "70 of 100 blocks" in text_of(app)
        del inspected.snapshot.sessions[1:]
        await until(lambda: shown_names(app) == ["chat"])
        del inspected.snapshot.sessions[:]
        await until(lambda: shown_names(app) == [])


@played
async def test_keys_sort_and_reverse_the_table_that_is_chosen(inspected: Inspected) -> None:
    async with screen(inspected) as (app, pilot):
        assert shown_names(app) == ["chat", "batch", "[red]evil�[2J"]
        await pilot.press("r")
        assert shown_names(app) == ["[red]evil�[2J", "batch", "chat"]
        await pilot.press("less_than_sign", "less_than_sign")
        assert shown_names(app) == ["[red]evil�[2J", "batch", "chat"]
        assert "by NAME, up" in text_of(app)
        await pilot.press("r")
        assert shown_names(app) == ["chat", "batch", "[red]evil�[2J"]
        await pilot.press("greater_than_sign")
        assert "by TENANT, up" in text_of(app)
        assert shown_names(app, "sequences") == ["1", "2", "1", "3", "3"]
        await pilot.press("tab", "greater_than_sign")
        assert "by LENGTH, down" in text_of(app)
        assert shown_names(app, "sequences") == ["1", "1", "2", "3", "3"]


@played
async def test_a_click_on_a_heading_sorts_and_another_reverses(inspected: Inspected) -> None:
    async with screen(inspected) as (app, pilot):
        tokens = (55, 1)
        await pilot.click("#sessions", offset=tokens)
        assert shown_names(app) == ["[red]evil�[2J", "batch", "chat"]
        assert "by TOKENS, down" in text_of(app)
        await pilot.click("#sessions", offset=tokens)
        assert shown_names(app) == ["chat", "batch", "[red]evil�[2J"]


@played
async def test_the_filter_is_the_daemons_search_while_it_is_typed(inspected: Inspected) -> None:
    async with screen(inspected) as (app, pilot):
        await pilot.press("slash", *"ba")
        await until(lambda: shown_names(app) == ["batch"])
        await pilot.press("t", "enter")
        await until(lambda: inspected.requests[-1].search == "bat")
        assert "Filter: bat" in text_of(app)
        await pilot.press("r")
        assert not app.query_one("#search").display
        await pilot.press("escape")
        await until(lambda: len(shown_names(app)) == 3)
        assert "Filter: " not in text_of(app)
        assert inspected.requests[-1].search == ""


@played
async def test_keys_are_text_where_a_filter_is_typed(inspected: Inspected) -> None:
    async with screen(inspected) as (app, pilot):
        await pilot.press("slash", *"qrp", "slash")
        await until(lambda: inspected.requests[-1].search == "qrp/")
        assert app.is_running


@played
async def test_a_daemon_that_goes_away_is_reported_and_found_again(inspected: Inspected) -> None:
    async with screen(inspected) as (app, _):
        inspected.stop()
        await until(lambda: "No answer, trying again." in text_of(app))
        assert "50 of 100 blocks" in text_of(app)
        assert len(shown_names(app)) == 3
        inspected.snapshot.pool.active_blocks = 70
        inspected.start()
        await until(lambda: "80 of 100 blocks" in text_of(app))
        assert "No answer" not in text_of(app)


@played
async def test_nothing_is_asked_while_it_is_paused(inspected: Inspected) -> None:
    async with screen(inspected) as (app, pilot):
        await pilot.press("p")
        assert "Paused." in text_of(app)
        asked = len(inspected.requests)
        inspected.snapshot.pool.active_blocks = 70
        await asyncio.sleep(10 * INTERVAL_S)
        assert len(inspected.requests) == asked
        assert "50 of 100 blocks" in text_of(app)
        await pilot.press("slash", *"chat")
        await until(lambda: shown_names(app) == ["chat"])
        await pilot.press("enter", "p")
        await until(lambda: len(inspected.requests) > asked + 6)
        assert "80 of 100 blocks" in text_of(app)
        assert "Paused." not in text_of(app)


@played
async def test_a_low_screen_shows_one_table_and_tab_the_next(inspected: Inspected) -> None:
    async with screen(inspected, SHORT) as (app, pilot):
        for title in ("Sessions: 3", "Sequences: 5", "Calls: 3", "Sessions: 3"):
            shown = [line for line in text_of(app).splitlines() if re.search(r"(Sessions|Sequences|Calls): \d", line)]
            assert len(shown) == 1
            assert title in shown[0]
            await pilot.press("tab")
        await pilot.press("shift+tab", "shift+tab")
        assert "Calls: 3" in text_of(app)


@played
async def test_schedulers_have_a_table_while_the_daemon_has_some(inspected: Inspected) -> None:
    add_scheduler(inspected.snapshot)
    async with screen(inspected, SHORT) as (app, pilot):
        assert "Requests waiting 70" in text_of(app)
        await pilot.press("tab")
        assert "Schedulers: 1, by WAITING, down" in text_of(app)
        assert re.search(r"1 +chat +70 +25 +4 +3 +1,234", text_of(app))
        inspected.snapshot = pool_in_use()  # the daemon was started anew
        await until(lambda: "Sequences: 5" in text_of(app))
        assert "Schedulers" not in text_of(app)
        await pilot.press("shift+tab")
        assert "Sessions: 3" in text_of(app)


@played
async def test_rows_keep_their_place_while_figures_change(inspected: Inspected) -> None:
    for number in range(200):
        inspected.snapshot.sequences.add(session_id=1, session_name="chat", sequence_id=number, blocks=1)
    async with screen(inspected, SHORT) as (app, pilot):
        await pilot.press("tab", *["pagedown"] * 3)
        table = app.query_one("#sequences", DataTable)
        row, scrolled = table.cursor_row, table.scroll_offset
        assert row > 20
        inspected.snapshot.sequences[0].length = 555
        del inspected.snapshot.sequences[150:]
        await until(lambda: table.row_count == 150)
        await pilot.pause()
        assert (table.cursor_row, table.scroll_offset) == (row, scrolled)
        assert "205" not in str(table.border_title)


def test_it_is_left_by_key(inspected: Inspected) -> None:
    async def scene(key: str) -> None:
        async with screen(inspected) as (app, pilot):
            await pilot.press(key)
            await until(lambda: not app.is_running)
            assert app.return_code == 0

    for key in ("q", "ctrl+c"):
        asyncio.run(scene(key))
