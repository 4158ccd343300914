"""The page of `compare --report`: well formed, with the table's figures and the schedules' curves."""

from __future__ import annotations

from onnxgc.api.comparison import compare
from onnxgc.api.page import page_of_comparison
from onnxgc.report.tables import megabytes
from tests.api.chains import chain
from tests.api.test_comparison import renamed
from tests.report.test_html import HOSTILE, Reader, data_of, hostile_model


def test_curves_are_those_of_the_lowest_peaks_and_of_storing_everything() -> None:
    found = compare(chain(5))
    text = page_of_comparison(found)
    reader = Reader(text)
    assert reader.open == []
    rows = found.report["rows"]
    drawn = [row for row in rows if row["name"] != "store-all"][:4]
    drawn += [row for row in rows if row["name"] == "store-all"]
    courses = data_of(text)["courses"]
    assert [course["label"] for course in courses] == [row["name"] for row in drawn]
    for row, course in zip(drawn, courses, strict=True):
        held = [0] * (len(course["name"]) + 1)
        for first, last, size in zip(course["first"], course["last"], course["bytes"], strict=True):
            for run in range(first, last + 1):
                held[run] += size
        assert max(held) == row["simulated_peak_bytes"]
    shown = " ".join(text for texts in reader.inside.values() for text in texts)
    assert all(row["name"] in shown for row in rows)
    assert megabytes(found.report["lower_bound_bytes"]) in shown
    assert f"{len(rows) - len(drawn)} more plans, of higher peaks, have no curve." in shown


def test_names_stay_text_and_the_same_call_gives_the_same_page() -> None:
    pages = [
        page_of_comparison(compare(hostile_model(), solvers=["acg"], plans={HOSTILE[0]: [f"{HOSTILE[1]}h"]}))
        for _ in range(2)
    ]
    assert pages[0] == pages[1]
    assert Reader(pages[0]).open == []
    assert "alert(1)</script>" not in pages[0]


def test_several_files_have_their_tables_and_curves() -> None:
    found = compare(chain(4), renamed(chain(4)))
    text = page_of_comparison(found)
    reader = Reader(text)
    assert reader.open == []
    courses = data_of(text)["courses"]
    labels = ["A: g", "B: g"]
    assert [course["label"] for course in courses] == [
        *labels,
        *(f"{one}, storing everything" for one in labels),
    ]
    shown = " ".join(text for texts in reader.inside.values() for text in texts)
    (pair,) = found.report["pairs"]
    assert f"the same network: {pair['matched_tensors']} tensors are matched" in shown
    for file in found.report["files"]:
        assert megabytes(file["planned"]["simulated_peak_bytes"]) in shown
    assert "store-all peak MB" in shown


def test_several_networks_have_tables_alone() -> None:
    found = compare(chain(2), chain(3), each=True, solvers=["acg", "chen-sqrt"])
    text = page_of_comparison(found)
    reader = Reader(text)
    assert reader.open == []
    assert data_of(text)["courses"] == []
    shown = " ".join(text for texts in reader.inside.values() for text in texts)
    for one in found.report["comparisons"]:
        assert megabytes(one["rows"][0]["simulated_peak_bytes"]) in shown
