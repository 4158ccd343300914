"""Plans for several networks, a row for each network."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import PurePath

from onnxgc.report.data.compare_report import EachReport, PlanRow, PlansReport
from onnxgc.report.text.plan_rows import BUDGET, NO_FIT, NO_PLAN
from onnxgc.report.text.text_table import BEST, Cells
from onnxgc.report.text.units import figure


def compared(report: EachReport) -> list[PlansReport]:
    return [one for one in report["comparisons"] if "error" not in one]


def overview_table(report: EachReport, *, all_columns: bool = False) -> Cells:
    """Peaks of all plans for all networks, as shares of the baseline's.

    Plans of less than half of the networks are left out unless `all_columns` are requested; the budget's is
    always shown.
    """
    networks = compared(report)
    names = _plan_names(networks, all_columns=all_columns)
    rows = []
    for one in networks:
        plans = {row["name"]: row for row in one["rows"]}
        cells = [_share(name, plans.get(name)) for name in names]
        rows.append((PurePath(one["model"]).stem, figure(one["regular"]["simulated_peak_bytes"]), *cells))
    headings = ("network", "baseline MB", *(name.replace("-", "-\n") for name in names))
    return Cells("simulated peaks, as shares of the baseline's", headings, rows)


def _plan_names(networks: Sequence[PlansReport], *, all_columns: bool) -> list[str]:
    """Names of plans by mean rank, then those that no network has."""
    ranks: defaultdict[str, list[float]] = defaultdict(list)
    for one in networks:
        for rank, row in enumerate(one["rows"]):
            ranks[row["name"]].append(rank / len(one["rows"]))
    order = sorted(ranks, key=lambda name: (sum(ranks[name]) / len(ranks[name]), name))
    order += sorted({item["name"] for one in networks for item in one["left_out"]} - ranks.keys())
    return [
        name
        for name in order
        if name != "store-all" and (all_columns or name == BUDGET or 2 * len(ranks[name]) >= len(networks))
    ]


def _share(name: str, row: PlanRow | None) -> str:
    if row is None:
        return NO_FIT if name == BUDGET else NO_PLAN
    return f"{BEST if row['best'] else ''}{100 * row['share_of_regular']:.1f}"


def overview_lines(report: EachReport, *, all_columns: bool = False, on_page: bool = False) -> list[str]:
    """The table's marks and omissions; in a terminal also the time, and the option for more."""
    networks = compared(report)
    shown = _plan_names(networks, all_columns=all_columns)
    hidden = [name for name in _plan_names(networks, all_columns=True) if name not in shown]
    lines = [f"{BEST} the lowest peak; shares in %"]
    if any(NO_PLAN in row for row in overview_table(report, all_columns=all_columns).rows):
        more = "reasons are below" if on_page else "-v shows the reasons"
        lines.append(f"{NO_PLAN} no plan of this kind for the network; {more}")
    if hidden:
        lines.append(f"not shown, since few networks have them: {', '.join(hidden)}")
    if not on_page:
        lines.append(f"{len(networks)} networks in {report.get('seconds', 0.0):.0f} s")
    for one in networks:
        lines += [f"{one['model']}: {item['reason']}" for item in one["left_out"] if item["name"] == BUDGET]
    lines += [f"{one['model']}: {one['error']}" for one in report["comparisons"] if "error" in one]
    return lines
