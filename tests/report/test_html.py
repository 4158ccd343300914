import base64
import hashlib
import re
import tomllib
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

import onnxgc
import onnxgc.report.html
from onnxgc.api.html_pages import page_of
from onnxgc.api.pipeline import OptimizeResult
from onnxgc.planning.schedule import Compute, Recompute
from onnxgc.report.data.memory_curve import (
    ForwardOperator,
    Lifetime,
    MemoryCurve,
    MemoryRole,
    Phase,
    Run,
    TensorFate,
    forward_operators,
    memory_curve,
)
from onnxgc.report.html import curves, network_strip, svg
from onnxgc.report.html.curves import memory_figure
from onnxgc.report.html.network_strip import network_figure
from onnxgc.report.html.payload import payload
from onnxgc.report.html.svg import area_path, blocks_path, columns, quarters, steps_path, ticks
from onnxgc.report.html.tables import Column, size, table
from onnxgc.report.html.tags import Html, tag
from onnxgc.report.text.printable import printable
from onnxgc.report.text.units import megabytes
from tests.api.chains import chain
from tests.model.model_helpers import normal, with_weights
from tests.report.page_data import course_totals, data_of

FOLDER = Path(onnxgc.report.html.__file__).parent
HOSTILE = (
    "</script><script>alert(1)</script>", "<img src=x onerror=alert(2)>", "a\"b'c&amp;", "名前😀", "<!--",
    "-->", "</title>", "x" * 300,
)  # fmt: skip
STATE = "optimizer state"
VOID = {"meta", "link", "br", "input"}


def hostile_model() -> onnx.ModelProto:
    nodes, tensor = [], "<b>in</b>"
    given = helper.make_tensor_value_info(tensor, TensorProto.FLOAT, [256, 16])
    for number, name in enumerate(HOSTILE):
        nodes.append(helper.make_node("MatMul", [tensor, f'w"{number}'], [name], name=f"node {name}"))
        tensor = f"{name}h"
        nodes.append(helper.make_node("Tanh", [name], [tensor], name=f"tanh {name}"))
    output = helper.make_tensor_value_info(tensor, TensorProto.FLOAT, [256, 16])
    graph = helper.make_graph(nodes, "<i>hostile</i>", [given], [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return with_weights(model, **{f'w"{number}': normal(16, 16, seed=number) / 4 for number in range(len(HOSTILE))})


@pytest.fixture(scope="module")
def hostile() -> OptimizeResult:
    return onnxgc.optimize(hostile_model(), check=False)


@pytest.fixture(scope="module")
def budgeted() -> OptimizeResult:
    return onnxgc.optimize(chain(4, 256), budget="60%", pareto=True, step_limit=1, check=False)


class Reader(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(attrs) == len(dict(attrs)), f"an attribute of <{tag}> is there twice"
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.inside.setdefault(self.open[-1] if self.open else "", []).append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")

    def named(self, *tags: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.elements if tag in tags]


@pytest.mark.parametrize("case", ["hostile", "budgeted"])
def test_it_is_well_formed_and_accessible(case: str, request: pytest.FixtureRequest):
    text = page_of(request.getfixturevalue(case))
    assert text.isascii()
    assert text.startswith('<!DOCTYPE html>\n<html lang="en">')
    reader = Reader(text)
    assert reader.open == []
    ids = Counter(attributes["id"] for _, attributes in reader.elements if "id" in attributes)
    assert max(ids.values()) == 1
    for _, attributes in reader.elements:
        href, labelled = attributes.get("href"), attributes.get("aria-labelledby")
        assert not labelled or labelled in ids
        assert not href or href == "data:," or href[1:] in ids
    counts = Counter(tag for tag, _ in reader.elements)
    assert [counts[name] for name in ("h1", "main", "header", "footer", "nav")] == [1] * 5
    levels = [int(tag[1]) for tag, _ in reader.elements if re.fullmatch("h[1-6]", tag)]
    assert all(below - above <= 1 for above, below in pairwise(levels))
    assert counts["table"] == counts["caption"]
    assert all(attributes.get("scope") in ("col", "row") for attributes in reader.named("th"))
    pictures = [attributes for attributes in reader.named("svg") if attributes.get("class") == "plot"]
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in pictures)
    assert len(pictures) == (3 if case == "budgeted" else 2)


def test_nothing_is_loaded_and_nothing_else_runs(hostile: OptimizeResult):
    reader = Reader(page_of(hostile))
    for element, attributes in reader.elements:
        assert not {"src", "srcset", "style", "xlink:href"} & attributes.keys(), element
        assert not any(name.startswith("on") for name in attributes), element
    style = (FOLDER / "style.css").read_text(encoding="ascii")
    script = (FOLDER / "script.js").read_text(encoding="ascii")
    assert not re.search(r"@import|https?:|url\((?!#)", style)
    # The name of the SVG namespace is not an address.
    assert re.findall(r"https?:[^\"]*", script) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"innerHTML|fetch\(|XMLHttpRequest|import|eval|localStorage", script)
    (policy,) = (meta["content"] for meta in reader.named("meta") if "http-equiv" in meta)
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    written = [text for text in reader.inside["script"] if "use strict" in text]
    for key, text in (("script-src", written[0]), ("style-src", "".join(reader.inside["style"]))):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{key} 'sha256-{digest}'" in policy


def test_names_of_a_model_are_text(hostile: OptimizeResult):
    text = page_of(hostile)
    reader = Reader(text)
    assert Counter(tag for tag, _ in reader.elements)["script"] == 2
    assert not reader.named("img", "i", "b")
    shown = "\n".join(reader.inside["span"])
    assert all(printable(name) in shown for name in HOSTILE)
    assert all(printable(name) in data_of(text)["texts"] for name in HOSTILE)
    assert reader.inside["h1"] == ["i>: memory of one training step"]
    assert "<i>hostile</i>" in reader.inside["dd"]


@pytest.mark.parametrize("case", ["hostile", "budgeted"])
def test_live_tensors_add_up_to_the_timeline(case: str, request: pytest.FixtureRequest):
    planned = request.getfixturevalue(case).planned
    courses = [
        memory_curve("planned", planned.step, planned.schedule),
        memory_curve("regular", planned.traced.step, planned.regular_schedule),
    ]
    data = data_of(page_of(request.getfixturevalue(case)))
    for number, profile in enumerate((planned.profile, planned.regular_profile)):
        curve = courses[number]
        assert curve.live_bytes().sum(axis=0).tolist() == list(profile.timeline)
        assert course_totals(data["courses"][number]) == list(profile.timeline)
        for step, live in enumerate(profile.timeline):
            assert sum(life.size_bytes for life in curve.alive_at(step)) == live
    again = [life for life in courses[0].lifetimes if life.role is MemoryRole.RECOMPUTED]
    copies = planned.schedule.original_of
    assert {life.tensor: life.original for life in again}.items() <= dict(copies).items()
    assert again


def test_roles_and_fates_follow_from_the_schedule(hostile: OptimizeResult):
    planned = hostile.planned
    course = memory_curve("planned", planned.step, planned.schedule)
    network = forward_operators(planned.step, planned.schedule, course, planned.solution.plan.checkpoints)
    steps = planned.schedule.instructions
    first_runs = [step for step in steps if isinstance(step, Compute) and step.chunk is None]
    assert [operator.name for operator in network] == [step.operator.name for step in first_runs]
    again = Counter(step.source for step in steps if isinstance(step, Recompute))
    assert {operator.name: operator.recomputations for operator in network if operator.recomputations} == again
    made = {life.tensor for life in course.lifetimes if life.role is MemoryRole.KEPT}
    for operator in network:
        assert (operator.fate is TensorFate.RECOMPUTED) == (again[operator.name] > 0)
        assert operator.fate is not TensorFate.KEPT or operator.tensor in made
        assert all(source < network.index(operator) for source in operator.reads)
    checkpoints = {operator.tensor for operator in network if operator.is_checkpoint}
    assert checkpoints <= set(planned.solution.plan.checkpoints)
    gradients = {life.tensor for life in course.lifetimes if life.role is MemoryRole.PARAMETER_GRADIENT}
    assert gradients == planned.step.graph.parameter_gradients


@pytest.mark.parametrize("budget", [None, "90%"])
def test_optimizer_state_is_the_base_of_the_curve(budget: str | None):
    limits: dict[str, Any] = {"budget": budget, "time_limit": 1, "step_limit": 1} if budget else {}
    found = onnxgc.optimize(chain(3, 64, 64), check=False, optimizer="adamw", **limits)
    state = found.report["optimizer"]["state_bytes"]
    text = page_of(found)
    reader, data = Reader(text), data_of(text)
    for course, kind in zip(data["courses"], ("planned", "regular"), strict=True):
        live = course_totals(course)
        figures: Any = found.report
        assert max(live) == figures[kind]["simulated_peak_bytes"]
        assert min(live) >= state
        (number,) = (life for life, role in enumerate(course["role"]) if data["roles"][role] == STATE)
        assert (course["first"][number], course["last"][number]) == (0, len(live) - 1)
    assert data["roles"][0] == STATE
    assert any(text.startswith(f"{STATE} ") for text in reader.inside["text"])
    # It is not an operator's output.
    assert sum(data["network"]["bytes"]) < max(live) - state
    if budget:
        assert f"budget {megabytes(found.report['budget']['bytes'] or 0)}" in reader.inside["text"]


def test_steps_are_counted_from_one(hostile: OptimizeResult):
    reader = Reader(page_of(hostile))
    timeline = hostile.planned.profile.timeline
    at, last = timeline.index(max(timeline)) + 1, len(timeline)
    assert reader.inside["figcaption"][0].startswith("planned: peak ")
    assert f" at step {at:,} of {last:,}" in reader.inside["figcaption"][0]
    assert any(text.startswith(f"Live at step {at:,} of {last:,}") for text in reader.inside["span"])
    marks = reader.inside["text"]
    assert {"step 1", "operator 1", f"{last:,}"} <= set(marks)
    assert quarters(8) == ["1", "3", "5", "7", "8"]
    assert (quarters(0), quarters(1)) == (["0"] * 5, ["1"] * 5)


def test_the_same_result_has_the_same_bytes(hostile: OptimizeResult):
    text = page_of(hostile, [("--seed", "1")])
    slower: Any = {**hostile.report, "seconds": {"total": 1e6}}
    assert page_of(replace(hostile, report=slower), [("--seed", "1")]) == text
    assert page_of(onnxgc.optimize(hostile_model(), check=False), [("--seed", "1")]) == text


def test_the_page_shows_the_chosen_plan_the_budget_and_the_settings(budgeted: OptimizeResult):
    reader = Reader(page_of(budgeted, [("--budget", "60%")]))
    facts = reader.inside["dd"]
    assert "--budget 60%" in facts
    assert any(text.startswith("data sheet of") for text in facts)
    assert "chosen" in reader.inside["text"]
    assert any(text.startswith("budget ") for text in reader.inside["text"])
    line = [attributes for attributes in reader.named("line") if attributes.get("class") == "budget"]
    assert line
    circles = reader.named("circle")
    assert sum(attributes.get("class") == "chosen" for attributes in circles) == 1
    peaks = {(point["simulated_peak_bytes"], point["extra_time_ratio"]) for point in budgeted.report["frontier"]}
    assert sum("r" in attributes and attributes["r"] == "4" for attributes in circles) == len(peaks)


def test_a_large_network_stays_small():
    """Thousands of operators with long names, each with a recomputation and a backward."""
    count, form = 2_000, "float32 64x64"
    names = [f"model/encoder/layers.{number // 10}/attention/projection_{number}" for number in range(count)]
    runs = [Run(name, "MatMul", Phase.FORWARD) for name in names]
    for name in reversed(names):
        runs.append(Run(f"{name}__recompute", "MatMul", Phase.RECOMPUTATION, name))
        runs += [Run(f"{name}/grad/{op}", op, Phase.BACKWARD, name) for op in ("Gemm", "Mul")]
    lives = tuple(
        Lifetime(name, name, step, min(step + step * 7919 % 97, len(runs) - 1), 4096 + step, MemoryRole.KEPT, form)
        for step, name in enumerate(f"{run.name}:0" for run in runs)
    )
    course = MemoryCurve("planned", tuple(runs), lives)
    network = [
        ForwardOperator(
            name, "MatMul", f"{name}:0", form, 4096, TensorFate.RECOMPUTED, 1, number // 10, number % 10 == 0,
            (number - 1, number - 5) if number > 5 else (),
        )
        for number, name in enumerate(names)
    ]  # fmt: skip
    assert len(payload([course, course], network)) < 600_000
    assert len(memory_figure([course, course], 10**6)) < 300_000
    assert len(network_figure(network)) < 300_000


def test_the_script_draws_in_the_same_places():
    script = (FOLDER / "script.js").read_text(encoding="ascii")
    constants = {name: int(value) for name, value in re.findall(r"\b([A-Z_]+) = (\d+)\b", script)}
    for module, names in (
        (svg, ("WIDTH",)),
        (curves, ("HEIGHT", "LANE")),
        (network_strip, ("ARCS", "MARKS", "BARS", "SEGMENTS", "MAX_ARCS")),
    ):
        assert [constants[name] for name in names] == [getattr(module, name) for name in names]


@pytest.mark.parametrize("count", [0, 1, 7, 1000, 1001, 43_417])
def test_columns_have_every_place_once(count: int):
    assert [place for column in columns(count) for place in column] == list(range(count))
    assert len(columns(count)) == min(count, 1000)


def test_paths_go_through_every_column():
    assert steps_path([3, 3, 1, 1]) == "M0 3H500V1H1000"
    assert area_path([3, 1], 5, 0.5) == "M0 3H250V1H500V5H0Z"
    assert blocks_path([True, True, False, True], 1, 2) == "M0 1H500v2H0ZM750 1H1000v2H750Z"
    assert (steps_path([]), area_path([], 5), blocks_path([False], 1, 2)) == ("", "", "")


@pytest.mark.parametrize("highest", [1, 999, 1_398_000_000, 0.062])
def test_ticks_are_few_and_reach_up(highest: float):
    values = ticks(highest)
    assert values[0] == 0
    assert highest / 2 < values[-1] <= highest
    assert 2 <= len(values) <= 9
    assert ticks(0) == [0]


def test_html_stays_and_other_text_is_escaped():
    assert tag("p", "<&\"'", Html("<b></b>"), title='"<', class_="a", hidden=True, lang=None) == (
        '<p title="&quot;&lt;" class="a" hidden>&lt;&amp;&quot;&#x27;<b></b></p>'
    )
    assert tag("meta", http_equiv="x") == '<meta http-equiv="x">'


def test_sizes_in_tables():
    assert [size(value) for value in (0, 4, 1000, 2_500_000)] == ["0", "4 B", "0.001 MB", "2.5 MB"]
    written = table("<c>", [Column("a"), Column("b", size)], [["x", 5], ["all", 5]], footer=True)
    assert '<tbody><tr><th scope="row">x</th><td class="number" data-value="5">5 B</td></tr></tbody>' in written
    assert "<tfoot><tr><th" in written
    assert 'aria-label="&lt;c&gt;"' in written


def test_the_scripts_and_styles_are_packaged():
    root = FOLDER.parent.parent.parent
    packaged = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["onnxgc"]
    files = [path for path in FOLDER.iterdir() if path.is_file() and path.suffix != ".py"]
    assert {path.relative_to(root / "onnxgc").as_posix() for path in files} <= set(packaged)
    assert len(files) == 2
