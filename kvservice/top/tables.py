"""A table widget that keeps its scroll position while its rows change."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual import on
from textual.coordinate import Coordinate
from textual.widgets import DataTable

from kvservice.top.columns import Table
from kvservice.v1.inspect_pb2 import Snapshot


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
