from onnxgc.api.comparison import compare
from onnxgc.api.html_pages import page_of_comparison
from onnxgc.report.text.plan_rows import plans_lines, plans_table
from onnxgc.report.text.units import figure, megabytes
from tests.api.chains import chain
from tests.api.test_comparison import renamed
from tests.report.page_data import course_totals, data_of
from tests.report.test_html import HOSTILE, Reader, hostile_model


def test_curves_are_those_of_the_lowest_peaks_and_of_the_baseline():
    found = compare(chain(5))
    text = page_of_comparison(found)
    reader = Reader(text)
    assert reader.open == []
    rows = found.report["rows"]
    drawn = [row for row in rows if row["name"] != "store-all"][:4]
    drawn += [row for row in rows if row["name"] == "store-all"]
    curves = data_of(text)["courses"]
    assert [curve["label"] for curve in curves] == [row["name"] for row in drawn]
    for row, curve in zip(drawn, curves, strict=True):
        assert max(course_totals(curve)) == row["simulated_peak_bytes"]
    shown = " ".join(text for texts in reader.inside.values() for text in texts)
    assert all(row["name"] in shown for row in rows)
    assert megabytes(found.report["lower_bound_bytes"]) in shown
    assert f"{len(rows) - len(drawn)} more plans have no curve." in shown
    # Terminal and page have the same headings, marks and lines.
    headings = [text for text in reader.inside["th"] if text in plans_table(found.report).headings]
    assert headings == list(plans_table(found.report).headings[:-1])
    assert f"* {rows[0]['name']}" in reader.inside["span"]
    assert all(line in reader.inside["li"] for line in plans_lines(found.report))


def test_given_plans_have_curves_and_their_difference():
    plans = {"before": ["h1", "h4"], "after": ["h1", "h2", "h6"]}
    found = compare(chain(8), plans=plans, solvers=("acg", "chen-sqrt", "chen-greedy"))
    text = page_of_comparison(found)
    reader = Reader(text)
    curves = data_of(text)["courses"]
    assert len(curves) == 5
    assert {curve["label"] for curve in curves[:2]} == {"before", "after"}
    # Both plans keep h6, a checkpoint of one only.
    assert text.count('<span class="name">h5</span></th><td>kept</td><td>recomputed</td>') == 1
    assert '<span class="name">h6</span></th><td>kept</td>' not in text
    assert "3 tensors are kept or recomputed by one plan only" in reader.inside["span"]
    for side in found.report["difference"]["plans"]:
        step = f"step {side['peak_step_number']:,} of {side['steps']:,}"
        # Captions and lines count steps in the same way.
        assert any(f"{side['name']}: peak" in text and step in text for text in reader.inside["figcaption"])
        assert any(text.startswith(f"{side['name']}: peak") and step in text for text in reader.inside["li"])


def test_names_stay_text_and_the_same_call_gives_the_same_page():
    pages = [
        page_of_comparison(compare(hostile_model(), solvers=["acg"], plans={HOSTILE[0]: [f"{HOSTILE[1]}h"]}))
        for _ in range(2)
    ]
    assert pages[0] == pages[1]
    assert Reader(pages[0]).open == []
    assert "alert(1)</script>" not in pages[0]


def test_several_files_have_their_tables_and_curves():
    found = compare(chain(4), renamed(chain(4)))
    text = page_of_comparison(found)
    reader = Reader(text)
    assert reader.open == []
    curves = data_of(text)["courses"]
    labels = ["A: g", "B: g (2)"]
    assert [curve["label"] for curve in curves] == [
        *labels,
        *(f"{one}, baseline" for one in labels),
        "B: g (2), the plan of A",
    ]
    figures = [found for found in reader.named("figure") if found.get("class") == "memory"]
    # The second file's curves are in the section of the pair, which comes first.
    drawn = [(found["id"], found["data-courses"]) for found in figures]
    assert drawn == [("memory-1", "4 1 3"), ("memory", "0 1 2 3")]
    shown = " ".join(text for texts in reader.inside.values() for text in texts)
    (pair,) = found.report["pairs"]
    assert f"the same network: {pair['matched_tensors']} tensors are matched" in shown
    for file in found.report["files"]:
        assert megabytes(file["planned"]["simulated_peak_bytes"]) in shown
    assert max(course_totals(curves[4])) == pair["carried_over"]["simulated_peak_bytes"]
    assert "one network in several files" in shown


def test_several_networks_have_tables_only():
    found = compare(chain(2), chain(3), each=True, solvers=["acg", "chen-sqrt"])
    text = page_of_comparison(found)
    reader = Reader(text)
    assert reader.open == []
    assert data_of(text)["courses"] == []
    shown = " ".join(text for texts in reader.inside.values() for text in texts)
    for one in found.report["comparisons"]:
        assert figure(one["rows"][0]["simulated_peak_bytes"]) in shown
