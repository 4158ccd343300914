from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from onnxgc.planning.schedule import (
    Compute,
    Operator,
    Release,
    Schedule,
    StepGraph,
    build_schedule,
    segment_order,
    segment_read_first,
)
from onnxgc.planning.simulate import simulate


def copy_name(name: str) -> str:
    return f"{name}'"


def chain(length: int, size: int = 1) -> StepGraph:
    """t0 -> t1 -> ... with a backward that reads every operator's input."""
    tensors = [f"t{i}" for i in range(length + 1)]
    forward = tuple(Operator(f"f{i}", (tensors[i],), (tensors[i + 1],), flops=1) for i in range(length))
    chunks = tuple((Operator(f"b{i}", (tensors[i], f"g{i + 1}"), (f"g{i}",)),) for i in reversed(range(length)))
    sizes = dict.fromkeys([*tensors, *(f"g{i}" for i in range(length + 1))], size)
    sources = tuple(f"f{i}" for i in reversed(range(length)))
    return StepGraph(forward, chunks, sources, sizes, frozenset({"t0", f"g{length}"}), ("g0",), frozenset())


@st.composite
def step_graphs(draw: st.DrawFn) -> tuple[StepGraph, frozenset[str]]:
    """A random forward graph, a backward that reads some of it, and a random set of discarded tensors."""
    count = draw(st.integers(2, 9))
    tensors = [f"t{i}" for i in range(count)]
    sizes = {name: draw(st.integers(0, 9)) for name in tensors}
    forward, chunks = [], []
    for i in range(1, count):
        sources = draw(st.lists(st.sampled_from(tensors[:i]), min_size=1, max_size=3, unique=True))
        view = draw(st.integers(0, 4)) == 0
        if view:
            sizes[tensors[i]] = sizes[sources[0]]
        forward.append(
            Operator(
                f"f{i}",
                tuple(sources),
                (tensors[i],),
                is_view=view,
                in_place=draw(st.booleans()),
                once=draw(st.integers(0, 5)) == 0,
                workspace_bytes=draw(st.integers(0, 3)),
                flops=1,
            )
        )
    before = "seed"
    for i in reversed(range(1, count)):
        reads = draw(st.lists(st.sampled_from(tensors[: i + 1]), max_size=2, unique=True))
        sizes[f"g{i}"] = draw(st.integers(0, 9))
        chunks.append((Operator(f"b{i}", (*reads, before), (f"g{i}",)),))
        before = f"g{i}"
    discarded = frozenset(draw(st.lists(st.sampled_from(tensors[1:]), unique=True)))
    differentiated = tuple(f"f{i}" for i in reversed(range(1, count)))
    resident = frozenset({"t0", "seed"})
    graph = StepGraph(tuple(forward), tuple(chunks), differentiated, sizes, resident, (before,), frozenset())
    return graph, discarded


def check_reads(graph: StepGraph, schedule: Schedule) -> None:
    live = set(graph.resident)
    for step in schedule.instructions:
        if isinstance(step, Release):
            assert live >= set(step.tensors)
            live -= set(step.tensors)
        else:
            assert live >= set(step.operator.inputs), step
            assert not live & set(step.operator.outputs), step
            live |= set(step.operator.outputs)
    assert live >= set(graph.outputs)


@settings(max_examples=100, deadline=None)
@given(step_graphs())
def test_backward_reads_the_same_live_tensors_under_every_plan(case: tuple[StepGraph, frozenset[str]]):
    graph, discarded = case
    schedule = build_schedule(graph, discarded, copy_name)
    check_reads(graph, schedule)
    computed = [step for step in schedule.instructions if isinstance(step, Compute)]
    planned = [
        tuple(schedule.original_of.get(name, name) for name in step.operator.inputs)
        for step in computed
        if step.chunk is not None
    ]
    assert planned == [operator.inputs for chunk in graph.chunks for operator in chunk]
    assert [s.operator.name for s in computed if s.chunk is None] == [o.name for o in graph.forward]
    rerun = [step.source for step in schedule.recomputed]
    assert len(rerun) == len(set(rerun)), "at most one more forward"
    once = {operator.name for operator in graph.forward if operator.once}
    assert not once & set(rerun)


def naive_timeline(schedule: Schedule, graph: StepGraph) -> list[int]:
    """Live bytes while each operator runs, by a naive simulation: storages as sets of tensors."""
    storages: list[tuple[int, set[str]]] = []
    timeline = []
    steps = schedule.instructions
    for index, step in enumerate(steps):
        if isinstance(step, Release):
            storages = [(size, names - set(step.tensors)) for size, names in storages]
            storages = [(size, names) for size, names in storages if names]
            continue
        operator = step.operator
        after = steps[index + 1] if index + 1 < len(steps) else None
        dying = set(after.tensors) if isinstance(after, Release) else set()
        home = next((names for _, names in storages if operator.inputs[0] in names), None)
        for position, name in enumerate(operator.outputs):
            original = schedule.original_of.get(name, name)
            source = schedule.original_of.get(operator.inputs[0], operator.inputs[0])
            first = position == 0 and name not in graph.outputs
            if first and operator.is_view:
                if home is not None:
                    home.add(name)
            elif (
                first
                and operator.in_place
                and home is not None
                and home <= dying
                and graph.sizes[original] == graph.sizes[source]
            ):
                home.add(name)
            else:
                storages.append((graph.sizes[original], {name}))
        timeline.append(sum(size for size, _ in storages) + operator.workspace_bytes)
    return timeline


@settings(max_examples=100, deadline=None)
@given(step_graphs())
def test_the_simulator_equals_a_naive_one_and_the_order_of_segments_is_topological(
    case: tuple[StepGraph, frozenset[str]],
):
    graph, discarded = case
    schedule = build_schedule(graph, discarded, copy_name)
    profile = simulate(schedule, graph)
    assert list(profile.timeline) == naive_timeline(schedule, graph)
    assert profile.peak_bytes == max(profile.timeline)
    order = segment_order(graph, discarded)
    by_name = {operator.name: operator for operator in graph.forward}
    assert sorted(order) == sorted(by_name)
    computed = set(graph.resident)
    for name in order:
        assert computed >= set(by_name[name].inputs)
        computed |= set(by_name[name].outputs)


def test_peak_of_a_chain_by_hand():
    graph = chain(9)
    baseline = simulate(build_schedule(graph, frozenset(), copy_name), graph)
    # t9 is unread and released at once; t1..t8 are live when the first gradient is computed.
    assert baseline.peak_bytes == 9
    kept = {"t3", "t6", "t9"}
    discarded = frozenset(f"t{i}" for i in range(1, 10)) - kept
    planned = simulate(build_schedule(graph, discarded, copy_name), graph)
    # t3, t6, the kept last segment t7 t8, one gradient.
    assert planned.peak_bytes == 5
    assert planned.peak_bytes < baseline.peak_bytes


def test_unread_tensors_are_released_at_once_and_outputs_stay():
    graph = chain(3)
    profile = simulate(build_schedule(graph, frozenset(), copy_name), graph)
    # t1, t2 and t3; then t3 is released, and gradients are allocated as t2, t1 are released.
    assert profile.timeline == (1, 2, 3, 3, 3, 2)
    last = build_schedule(graph, frozenset(), copy_name).instructions[-1]
    assert isinstance(last, Release)
    assert "g0" not in last.tensors


def test_parameter_gradients_are_reported_separately():
    graph = StepGraph(
        (Operator("f", ("x",), ("y",)),),
        ((Operator("b", ("y",), ("dw",)),), (Operator("c", ("dw",), ("z",)),)),
        ("f", "f"),
        {"x": 1, "y": 10, "dw": 100, "z": 5},
        frozenset({"x"}),
        ("dw", "z"),
        frozenset({"dw"}),
    )
    profile = simulate(build_schedule(graph, frozenset(), copy_name), graph)
    assert profile.peak_bytes == 110
    assert profile.parameter_gradient_bytes == 100
    assert profile.activation_peak_bytes == 10


def test_gradients_freed_by_updates_do_not_count_at_a_later_peak():
    """The gradient of the second parameter is computed after the update of the first."""
    updates = (
        Operator("b1", ("a",), ("g1",)),
        Operator("u1", ("g1", "p1"), ("p1 new",)),
        Operator("b2", ("a",), ("t",)),
        Operator("b3", ("t",), ("g2",)),
        Operator("u2", ("g2", "p2"), ("p2 new",)),
    )
    graph = StepGraph(
        (Operator("f", ("x",), ("a",)),),
        (updates,),
        ("f",),
        {"a": 10, "g1": 100, "p1 new": 0, "t": 50, "g2": 100, "p2 new": 0},
        frozenset({"x", "p1", "p2"}),
        ("p1 new", "p2 new"),
        frozenset({"g1", "g2"}),
        {"p1 new": "p1", "p2 new": "p2"},
    )
    profile = simulate(build_schedule(graph, frozenset(), copy_name), graph)
    # At b3 t and g2 are live: a and g1 are released.
    assert (profile.peak_operator, profile.peak_bytes) == ("b3", 150)
    assert profile.activation_peak_bytes == 60
    assert profile.parameter_gradient_bytes == 0


def test_parallel_segments_are_computed_one_after_another():
    """Two branches that the model interleaves between the same two checkpoints."""
    names = ["x", "a1", "b1", "a2", "b2", "a3", "b3", "y", "z"]
    reads = {
        "a1": "x", "b1": "x", "a2": "a1", "b2": "b1", "a3": "a2", "b3": "b2",
    }  # fmt: skip
    forward = [Operator(f"f_{name}", (source,), (name,)) for name, source in reads.items()]
    forward.append(Operator("f_y", ("a3", "b3"), ("y",)))
    forward.append(Operator("f_z", ("y",), ("z",)))
    graph = StepGraph(tuple(forward), (), (), dict.fromkeys(names, 1), frozenset({"x"}), ("z",), frozenset())
    order = segment_order(graph, frozenset(reads))
    assert order[:3] in (("f_a1", "f_a2", "f_a3"), ("f_b1", "f_b2", "f_b3"))
    assert segment_order(graph, frozenset()) == tuple(operator.name for operator in forward)


def operators(graph: StepGraph, discarded: frozenset[str]) -> list[str]:
    instructions = build_schedule(graph, discarded, copy_name).instructions
    return [step.operator.name for step in instructions if not isinstance(step, Release)]


def test_recomputation_is_right_before_its_first_reader():
    graph = chain(6)
    discarded = frozenset({"t1", "t2", "t4", "t5"})
    assert operators(graph, discarded)[6:] == [
        "f3__recompute", "f4__recompute", "b5", "b4", "b3",
        "f0__recompute", "f1__recompute", "b2", "b1", "b0",
    ]  # fmt: skip
    assert segment_read_first(graph, discarded) == {"t4", "t5"}


def test_parallel_branches_are_recomputed_one_by_one():
    """Of a discarded diamond each chunk recomputes only its own inputs."""
    forward = (Operator("f_a", ("x",), ("a",)), Operator("f_b", ("x",), ("b",)), Operator("f_y", ("a", "b"), ("y",)))
    chunks = (
        (Operator("b_y", ("y",), ("g",)),),
        (Operator("b_b", ("b", "g"), ("h",)),),
        (Operator("b_a", ("a", "h"), ("i",)),),
    )
    sizes = dict.fromkeys(("x", "a", "b", "y", "g", "h", "i"), 1)
    graph = StepGraph(forward, chunks, ("f_y", "f_b", "f_a"), sizes, frozenset({"x"}), ("i",), frozenset())
    assert operators(graph, frozenset("ab"))[3:] == ["b_y", "f_b__recompute", "b_b", "f_a__recompute", "b_a"]


def test_a_view_that_is_an_output_is_allocated():
    graph = StepGraph(
        (Operator("f", ("x",), ("y",)), Operator("view", ("y",), ("z",), is_view=True)),
        (),
        (),
        {"x": 1, "y": 10, "z": 10},
        frozenset({"x"}),
        ("z",),
        frozenset(),
    )
    assert simulate(build_schedule(graph, frozenset(), copy_name), graph).timeline == (10, 20)


def test_unread_trailing_outputs_are_omitted():
    pool = Operator("pool", ("a",), ("y", "indices"))
    graph = StepGraph(
        (Operator("f", ("x",), ("a",)), pool, Operator("g", ("y",), ("z",)), Operator("h", ("z",), ("l",))),
        ((Operator("b1", ("z", "l"), ("dz",)),), (Operator("b2", ("dz", "indices"), ("da",)),)),
        ("g", "pool"),
        {"x": 1, "a": 4, "y": 1, "indices": 2, "z": 1, "l": 1, "dz": 1, "da": 4},
        frozenset({"x"}),
        ("da",),
        frozenset(),
    )
    kept = build_schedule(graph, frozenset(), copy_name)
    assert [s.operator for s in kept.instructions if isinstance(s, Compute)][1].outputs == ("y", "indices")
    unread = replace(graph, chunks=graph.chunks[:1], sources=graph.sources[:1], outputs=("dz",))
    bare = build_schedule(unread, frozenset(), copy_name)
    assert [s.operator for s in bare.instructions if isinstance(s, Compute)][1].outputs == ("y",)
