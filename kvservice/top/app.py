"""The terminal application: a summary, tables, and key bindings."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.coordinate import Coordinate
from textual.widgets import DataTable, Footer, Input, Static
from textual.worker import Worker

from kvservice.errors import KVServiceError
from kvservice.top.columns import TABLES, Table
from kvservice.top.format import printable
from kvservice.top.source import Source
from kvservice.top.summary import summary
from kvservice.v1.inspect_pb2 import Snapshot

# ---- a table widget that keeps its scroll position while its rows change


class SnapshotTable(DataTable[Text]):
    DEFAULT_CSS: ClassVar[str] = """
    SnapshotTable {
        border-top: solid ansi_default;
        border-title-style: bold;
        height: 1fr;
        background-tint: transparent;
        &.current { border-top: heavy ansi_default; }
        &:ansi > .datatable--header { background: ansi_default; color: ansi_default; text-style: bold; }
        & > .datatable--cursor { background: ansi_default; color: ansi_default; text-style: none; }
        &:focus > .datatable--cursor { background: ansi_default; color: ansi_default; text-style: reverse; }
    }
    """

    def __init__(self, table: Table, sort_key: str) -> None:
        super().__init__(cursor_type="row", id=table.name.lower())
        self._table = table
        self._sort_key = table.column(sort_key).key
        self._reverse = False
        self._snapshot = Snapshot()
        # The texts of the cells. Comparing texts is much cheaper than updating cells.
        self._rows: list[list[str]] = []

    def on_mount(self) -> None:
        for column in self._table.columns:
            self.add_column(Text(column.title, justify=column.justify), key=column.key, width=column.width)

    def show(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self.set_class(not self.is_shown, "unused")
        columns = self._table.columns
        rows = [
            [column.shown(row) for column in columns]
            for row in self._table.ordered(snapshot, self._sort_key, self._reverse)
        ]
        self._set_row_count(len(rows))
        for number, (new, old) in enumerate(zip(rows, self._rows, strict=True)):
            for place, column in enumerate(columns):
                if new[place] != old[place]:
                    self.update_cell_at(Coordinate(number, place), column.cell(new[place]))
        self._rows = rows
        self._set_title(len(rows))

    @property
    def is_shown(self) -> bool:
        """Return whether the daemon has rows for the table."""
        return self._table.is_shown(self._snapshot)

    def _set_row_count(self, count: int) -> None:
        if 2 * count < len(self._rows):
            # Removing a single row takes time proportional to the number of rows.
            self.clear()
            self._rows = []
        while len(self._rows) > count:
            self._rows.pop()
            self.remove_row(str(len(self._rows)))
        empty = [""] * len(self._table.columns)
        for _ in range(count - len(self._rows)):
            self.add_row(*map(Text, empty), key=str(len(self._rows)))
            self._rows.append(empty)

    def _set_title(self, shown: int) -> None:
        column = self._table.column(self._sort_key)
        direction = "up" if column.is_number == self._reverse else "down"
        total = self._table.total(self._snapshot)
        count = f"{shown:,}" if shown == total else f"the {shown:,} with the most blocks of {total:,}"
        self.border_title = f"{self._table.name}: {count}, by {column.title}, {direction}"

    def sort_by_next(self, step: int) -> None:
        keys = [column.key for column in self._table.columns]
        self._sort_by(keys[(keys.index(self._sort_key) + step) % len(keys)])

    def reverse(self) -> None:
        self._reverse = not self._reverse
        self.show(self._snapshot)

    def _sort_by(self, key: str) -> None:
        self._sort_key, self._reverse = key, False
        self.show(self._snapshot)

    @on(DataTable.HeaderSelected)
    def _clicked(self, event: DataTable.HeaderSelected) -> None:
        """Sort by the clicked column, or reverse the order if the table is already sorted by it."""
        key = str(event.column_key.value)
        if key == self._sort_key:
            self.reverse()
        else:
            self._sort_by(key)


# ---- the application


# Terminals with at most this many lines show only one table.
_SHORT_LINES = 40


class TopApp(App[None]):
    ENABLE_COMMAND_PALETTE = False
    VERTICAL_BREAKPOINTS = [(0, "-short"), (_SHORT_LINES + 1, "-tall")]  # noqa: RUF012  its base says so
    CSS = """
    #summary { height: auto; }
    #state { height: auto; text-style: bold reverse; }
    #state, #search { display: none; }
    #search { border: none; height: 1; padding: 0; background: ansi_default; color: ansi_default; }
    #calls { height: auto; max-height: 12; }
    #schedulers, #engines { height: auto; max-height: 8; }
    Screen.-short SnapshotTable { display: none; }
    Screen.-short SnapshotTable.current { display: block; height: 1fr; max-height: 100%; }
    SnapshotTable.unused { display: none; }
    .stale { text-style: dim; }
    Footer, FooterKey { background: ansi_default; color: ansi_default; }
    FooterKey > .footer-key--key { background: ansi_default; color: ansi_default; text-style: bold reverse; }
    FooterKey > .footer-key--description { background: ansi_default; color: ansi_default; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c", "quit", show=False, priority=True),
        Binding("tab", "next_table(1)", "Table", priority=True),
        Binding("shift+tab", "next_table(-1)", show=False, priority=True),
        Binding("greater_than_sign", "sort(1)", "Sort", key_display="< >"),
        Binding("less_than_sign", "sort(-1)", show=False),
        Binding("r", "reverse", "Reverse"),
        # Priority over the table, so that text typed directly after the slash goes to the filter.
        Binding("slash", "search", "Filter", priority=True),
        Binding("escape", "clear_search", "All", show=False, priority=True),
        Binding("p", "pause", "Pause"),
    ]

    def __init__(self, source: Source, first: Snapshot, interval_s: float, sort_key: str, search: str) -> None:
        super().__init__(ansi_color=True)
        # Use the terminal's own colours, light or dark.
        self.theme = "ansi-dark"
        self._source = source
        self._snapshot = first
        self._interval_s = interval_s
        self._summary = Static(id="summary")
        self._state = Static(id="state")
        self._field = Input(search, id="search", placeholder="name, tenant or id", compact=True)
        self._tables = [SnapshotTable(table, sort_key) for table in TABLES]
        self._current = self._tables[1]
        self._search = search
        self._error: KVServiceError | None = None
        self._paused = False
        self._asking: Worker[None] | None = None

    def compose(self) -> ComposeResult:
        yield self._summary
        yield self._state
        yield from self._tables
        yield self._field
        yield Footer()

    def on_mount(self) -> None:
        self._focus_table(self._current)
        self._show()
        self.set_interval(self._interval_s, self._tick)

    def _tick(self) -> None:
        if not self._paused and (self._asking is None or self._asking.is_finished):
            self._ask()

    def _ask(self) -> None:
        self._asking = self.run_worker(self._take_snapshot, exclusive=True)

    async def _take_snapshot(self) -> None:
        try:
            self._snapshot = await self._source.snapshot(self._search)
            self._error = None
        except KVServiceError as error:
            self._error = error
        self._show()

    def _show(self) -> None:
        self._summary.update(summary(self._snapshot, self._source.address))
        for table in self._tables:
            table.show(self._snapshot)
        if not self._current.is_shown:
            self.action_next_table(1)
        self._show_state()

    def _show_state(self) -> None:
        """Show why the figures are not current or not complete, if so."""
        reasons = []
        if self._error is not None:
            reasons.append(f"No answer, trying again. {printable(str(self._error))}")
        if self._paused:
            reasons.append("Paused.")
        if self._search:
            reasons.append(f"Filter: {printable(self._search)}")
        self._state.update(Text("  ".join(reasons)))
        self._state.display = bool(reasons)
        for widget in (self._summary, *self._tables):
            widget.set_class(self._error is not None, "stale")

    def _focus_table(self, table: SnapshotTable) -> None:
        self._current.remove_class("current")
        self._current = table
        table.add_class("current")
        table.focus()

    def action_next_table(self, step: int) -> None:
        shown = [table for table in self._tables if table.is_shown or table is self._current]
        self._focus_table(shown[(shown.index(self._current) + step) % len(shown)])

    def action_sort(self, step: int) -> None:
        self._current.sort_by_next(step)

    def action_reverse(self) -> None:
        self._current.reverse()

    def action_pause(self) -> None:
        self._paused = not self._paused
        if self._paused and self._asking is not None:
            self._asking.cancel()
        self._show_state()
        self._tick()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:  # noqa: ARG002  Textual's
        return not (action == "search" and isinstance(self.focused, Input))

    def action_search(self) -> None:
        self._field.display = True
        self.screen.set_focus(self._field)

    def action_clear_search(self) -> None:
        self._field.value = ""
        self._leave_search()

    @on(Input.Changed, "#search")
    def _search_changed(self, event: Input.Changed) -> None:
        if event.value != self._search:
            self._search = event.value
            self._show_state()
            # A new filter updates the view even while it is paused.
            self._ask()

    @on(Input.Submitted, "#search")
    def _leave_search(self) -> None:
        self._field.display = False
        self._focus_table(self._current)
