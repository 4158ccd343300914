"""Tables that fit the width of a terminal."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

from onnxgc.report.text.printable import printable
from onnxgc.report.text.text_table import BEST, Cells

_HEADING_WIDTH = 6
"""Width at which a heading is broken, unless the cells below are wider."""
_PARTS = re.compile(r"[^-_./: ]*[-_./: ]*")


@dataclass(frozen=True, slots=True)
class FittedTable:
    """A table without its title, as wide as the terminal.

    Names are broken between their parts if necessary. If that is not enough, the last columns of figures
    follow in a second table.
    """

    cells: Cells

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        first = self.cells.text_columns
        remaining = list(range(first, len(self.cells.headings)))
        names = [row[0] for row in self.cells.rows]
        longest = max(map(_width, names), default=0)
        narrowest = max((_width(_broken(name, 1)) for name in names), default=0)

        def room(shown: Sequence[int]) -> int:
            natural = console.measure(self._table(shown, longest), options=options.update(max_width=10**6))
            return longest - max(0, natural.maximum - options.max_width)

        while remaining or first:
            counts = range(len(remaining), 1, -1)
            fitting = next((count for count in counts if room(remaining[:count]) >= narrowest), 1)
            shown, remaining, first = remaining[:fitting], remaining[fitting:], 0
            yield self._table(shown, max(room(shown), 1))

    def _table(self, shown: Sequence[int], room: int) -> Table:
        cells = self.cells
        table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
        places = [*range(cells.text_columns), *shown]
        for place in places:
            below = max((_width(row[place]) for row in cells.rows), default=0)
            # Figures are never folded.
            table.add_column(
                Text(_broken(cells.headings[place], max(_HEADING_WIDTH, below if place else room))),
                justify="left" if place < cells.text_columns else "right",
                overflow="fold",
                min_width=below if place and below else None,
            )
        for row in cells.rows:
            table.add_row(
                *(Text(printable(row[place]) if place else _broken(printable(row[0]), room)) for place in places)
            )
        return table


def _broken(name: str, width: int) -> str:
    """A name in lines of at most that width, broken between its parts; wider parts stay whole."""
    indent = " " * (len(name) - len(name.lstrip(f"{BEST} ")))
    lines = [""]
    for part in filter(None, _PARTS.findall(name)):
        if lines[-1].strip(f"{BEST} ") and len(lines[-1]) + len(part) > width:
            lines.append(indent)
        lines[-1] += part
    return "\n".join(lines)


def _width(text: str) -> int:
    return max(map(len, text.split("\n")))
