"""A memory curve of a plan beside the baseline's, for a cell of a notebook."""

import numpy as np
import numpy.typing as npt

from onnxgc.report.html.svg import WIDTH, area_path, columns, steps_path, stretched
from onnxgc.report.html.tags import tag

_HEIGHT = 160


def curve_html(title: str, planned: npt.NDArray[np.generic], baseline: npt.NDArray[np.generic]) -> str:
    """A picture of two curves, each with one value for each run of an operator, from 0 to the higher peak."""
    highest = max(float(planned.max(initial=0)), float(baseline.max(initial=0))) or 1.0
    longest = max(len(planned), len(baseline), 1)

    def heights(curve: npt.NDArray[np.generic]) -> list[float]:
        return [_HEIGHT * (1 - float(curve[runs.start : runs.stop].max()) / highest) for runs in columns(len(curve))]

    area = tag("path", d=area_path(heights(planned), _HEIGHT, len(planned) / longest), fill="steelblue")
    line = tag(
        "path",
        d=steps_path(heights(baseline), len(baseline) / longest),
        fill="none",
        stroke="currentColor",
        vector_effect="non-scaling-stroke",
    )
    picture = tag("div", stretched(_HEIGHT, area, line), style=f"max-width: {WIDTH}px")
    return tag("div", tag("p", f"{title}. Area: the plan; line: the baseline; from 0 to {highest:,.15g}."), picture)
