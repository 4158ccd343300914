"""A table as plain cells, for terminal, HTML or Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass

from onnxgc.report.text.printable import printable

BEST = "*"
"""Mark of the lowest peak."""


@dataclass(frozen=True, slots=True)
class Cells:
    """A table: the first `text_columns` columns are text, the others figures."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: int = 1

    @property
    def headings_in_line(self) -> tuple[str, ...]:
        return tuple(heading.replace("-\n", "-").replace("\n", " ") for heading in self.headings)

    def markdown(self) -> str:
        """The table as Markdown, with the title in bold above it."""
        places = range(len(self.headings))
        rule = ["---" if place < self.text_columns else "---:" for place in places]
        lines = [self.headings_in_line, rule, *self.rows]
        escaped = (
            " | ".join(printable(cell).replace("|", "\\|").replace("\n", " ") for cell in line) for line in lines
        )
        return "\n".join((f"**{self.title}**", "", *(f"| {line} |" for line in escaped)))
