"""Tables and figures in documents."""

from collections.abc import Sequence

from scripts.benchmarking.records import Record

MEGABYTE = 10**6
MEBIBYTE = 2**20


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]], figures: bool = True) -> str:
    """A table with a first column of text and further columns of figures, or of text."""
    lines = [headings, ["---", *("---:" if figures else "---" for _ in headings[1:])], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def megabytes(size_bytes: float, digits: int = 0) -> str:
    return f"{size_bytes / MEGABYTE:,.{digits}f}"


def mebibytes(size_bytes: float) -> str:
    return f"{size_bytes / MEBIBYTE:,.0f}"


def machine_of(record: Record) -> str:
    """The machine, the runtime and the date of a record."""
    found = record["environment"]
    versions = found["versions"]
    runtime = versions.get("onnxruntime-gpu") or versions.get("onnxruntime")
    threads = f"{found['threads']} thread{'' if found['threads'] == 1 else 's'}"
    return (
        f"{found['cpu']}, {threads} of {found['cores']} cores, ONNX Runtime {runtime} (CPU provider), {found['date']}"
    )
