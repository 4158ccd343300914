"""Tables and figures as documents have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MEGABYTE = 10**6


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]], figures: bool = True) -> str:
    """A table whose first column is text and whose others are figures, or text too."""
    lines = [headings, ["---", *("---:" if figures else "---" for _ in headings[1:])], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def megabytes(size_bytes: float) -> str:
    return f"{size_bytes / MEGABYTE:,.0f}"


def where(record: Mapping[str, Any]) -> str:
    """The machine, the runtime and the day of a record."""
    found = record["environment"]
    versions = found["versions"]
    runtime = versions.get("onnxruntime-gpu") or versions.get("onnxruntime")
    threads = f"{found['threads']} thread{'' if found['threads'] == 1 else 's'}"
    return (
        f"{found['cpu']}, {threads} of {found['cores']} cores, ONNX Runtime {runtime} "
        f"(CPU provider), {found['date']}"
    )
