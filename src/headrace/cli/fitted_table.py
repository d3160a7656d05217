"""Tables that show as many columns as the terminal has room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len
from rich.table import Table

GAP = 2


@dataclass(frozen=True, slots=True)
class Cells:
    """One column."""

    head: str
    cells: Sequence[str]
    rank: int
    """Where space is short, columns of low rank stay."""
    words: bool = False
    """Text, not numbers: stands left."""

    @property
    def width(self) -> int:
        return max(map(cell_len, (self.head, *self.cells)))


def plain_table() -> Table:
    """An empty table without a frame: a line under the head, GAP cells between columns."""
    return Table(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, GAP - 1, 0, 0), show_edge=False, header_style="dim"
    )  # the box itself puts one cell between columns


def fitted_table(columns: Sequence[Cells], width: int, styles: Sequence[str]) -> Table:
    """The columns that fit `width` cells, chosen by rank, in their own order; a style per row.

    A wide column that does not fit gives way to narrower ones of higher rank.
    """
    left, kept = width + GAP, set()
    for i, column in sorted(enumerate(columns), key=lambda item: item[1].rank):
        if column.width + GAP <= left:
            kept.add(i)
            left -= column.width + GAP
    chosen = [column for i, column in enumerate(columns) if i in kept]
    table = plain_table()
    for column in chosen:
        table.add_column(column.head, justify="left" if column.words else "right", no_wrap=True)
    for row, style in enumerate(styles):
        table.add_row(*(column.cells[row] for column in chosen), style=style)
    return table
