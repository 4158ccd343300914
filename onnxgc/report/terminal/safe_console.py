"""A console that prints names of models and files safely."""

from typing import Any

from rich.console import Console
from rich.text import Text

from onnxgc.report.text.printable import printable


class SafeConsole(Console):
    """Prints plain texts and cells of tables in printable form; markup is not interpreted."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)
