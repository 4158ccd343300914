"""Gradients of whole models in the forms for CUDA beside those for CPUs, on the CPU provider.

python -m scripts.benchmarking.gradients_cuda NAME REQUEST RESULT    one model in this process
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from scripts.benchmarking import gradients
from scripts.benchmarking.gradient_comparison import ComparisonOptions, comparison_table, failed_rows, failures_of
from scripts.benchmarking.processes import rows_of_processes, write_result
from scripts.benchmarking.records import Progress, Record
from scripts.benchmarking.tables import machine_of

_MODELS = ("resnet50", "densenet121", "inception_v3", "vgg16", "vit_b_16", "bert", "gpt2")
_EXPORT = "dynamo-dynamic"


@dataclass(frozen=True, slots=True)
class Options(ComparisonOptions):
    small: bool = True


def run(options: Options, progress: Progress) -> dict[str, Any]:
    """Two rows a model, with an error in place of figures if one occurs."""
    names = options.only or _MODELS
    rows = rows_of_processes("gradients_cuda", "model", names, options, progress)
    return {"rows": [{"holds": False, **row} for row in rows]}


def failures(figures: Mapping[str, Any]) -> list[str]:
    return failed_rows(figures["rows"])


def compare_model(name: str, options: Options) -> list[dict[str, Any]]:
    own = gradients.Options(options.only, options.threads, options.verify, options.small)
    rows = gradients.compare_model(name, own, (_EXPORT,), ("cpu", "cuda"))
    for row in rows:
        if "distance_median" in row:
            row["of_cpu_forms"] = row["distance_median"] / rows[0].get("distance_median", np.nan)
            row["holds"] = not failures_of(row)
    return rows


def results_section(record: Record) -> str:
    rows = record["figures"]["rows"]
    ratio = max(row.get("of_cpu_forms", np.nan) for row in rows)
    return (
        "**Gradients in the forms for CUDA**, computed by the CPU provider, as above. The median distance "
        f"of a model's gradients is at most {ratio:.2f} times that of the forms for CPUs:"
        f"\n\n{comparison_table('model, export', rows)}\n\n{machine_of(record)}."
    )


if __name__ == "__main__":
    write_result(compare_model, Options)
