"""`onnxgc solve`: a bare graph in, JSON out; each bad graph one line and exit code 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from onnxgc.planning.objective import paper_objective
from onnxgc.planning.plan import CheckpointPlan
from onnxgc.solvers.baselines.exhaustive import EXHAUSTIVE
from onnxgc.solvers.registry import SOLVERS
from tests.cli.command import run_command
from tests.graph.random_graphs import problem_of, random_graph

ROOT = Path(__file__).resolve().parent.parent.parent
CHAIN: dict[str, Any] = {
    "vertices": [{"id": number, "size": size} for number, size in enumerate([5, 4, 1, 4, 3])],
    "edges": [[0, 1], [1, 2], [2, 3], [3, 4]],
    "source": 0,
    "target": 4,
}


class Command:
    """Runs the command line in this process."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.graph = folder / "graph.json"
        self._capsys = capsys

    def __call__(self, document: Any, *options: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr for a graph, given as text or as a JSON value."""
        self.graph.write_text(document if isinstance(document, str) else json.dumps(document))
        code = run_command("solve", str(self.graph), *options)
        captured = self._capsys.readouterr()
        return code, captured.out, captured.err

    def found(self, document: Any, *options: str) -> dict[str, Any]:
        code, out, err = self(document, *options)
        assert (code, err) == (0, "")
        result: dict[str, Any] = json.loads(out)
        return result

    def refusal(self, document: Any, *options: str) -> str:
        """The error of an invalid call."""
        code, out, err = self(document, *options)
        assert (code, out) == (2, "")
        assert len(err.splitlines()) == 1
        return err


@pytest.fixture
def solve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, capsys)


def test_as_a_program(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(CHAIN))
    done = subprocess.run(
        [sys.executable, "-m", "onnxgc", "solve", str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found.pop("seconds") >= 0
    assert found == {
        "solver": "acg", "status": "optimal", "objective": 13, "lower_bound": 13, "peak": 13, "sum": 13,
        "checkpoints": [0, 2, 4],
    }  # fmt: skip


def test_interior_only_leaves_source_and_target_out(solve: Command) -> None:
    found = solve.found(CHAIN, "--interior-only")
    assert (found["objective"], found["lower_bound"], found["checkpoints"]) == (5, 5, [2])
    single = {"vertices": [{"id": "x", "size": 4}], "edges": [], "source": "x", "target": "x"}
    assert solve.found(single)["objective"] == 4
    assert solve.found(single, "--interior-only")["objective"] == 0


@pytest.mark.parametrize("solver", [name for name in SOLVERS if name not in ("manual", "revolve", "bptt", "budget")])
def test_every_solver_by_name(solve: Command, solver: str) -> None:
    found = solve.found(CHAIN, "--solver", solver)
    assert found["solver"] == solver
    assert found["lower_bound"] <= found["objective"]
    assert found["checkpoints"][0] == 0
    assert found["checkpoints"][-1] == 4


def test_objectives(solve: Command) -> None:
    sizes = [0, 1, 1, 1, 9, 7, 0]
    document = {
        "vertices": [{"id": number, "size": size} for number, size in enumerate(sizes)],
        "edges": [[0, 1], [1, 2], [2, 3], [3, 4], [4, 5], [1, 4], [5, 6]],
        "source": 0,
        "target": 6,
    }
    chain_of_1000 = {
        "vertices": [{"id": number, "size": 1} for number in range(1002)],
        "edges": [[number, number + 1] for number in range(1001)],
        "source": 0,
        "target": 1001,
    }
    assert solve.found(document, "--objective", "paper")["solver"] == "acg"
    everywhere = solve.found(document, "--solver", "exhaustive", "--objective", "general")
    independent = solve.found(document, "--solver", "exhaustive")
    assert everywhere["objective"] <= independent["objective"]
    released = solve.found(chain_of_1000, "--objective", "peak", "--interior-only")
    assert (released["solver"], released["objective"]) == ("peak", 44)
    assert 0 < released["lower_bound"] <= 44
    assert "has the objective 'paper', not 'peak'" in solve.refusal(document, "--solver", "acg", "--objective", "peak")


def test_numbers_of_single_solvers(solve: Command) -> None:
    chain = {
        "vertices": [{"id": number, "size": 2} for number in range(13)],
        "edges": [[number, number + 1] for number in range(12)],
        "source": 0,
        "target": 12,
    }
    kept = [len(solve.found(chain, "--solver", "revolve", "--slots", str(slots))["checkpoints"]) for slots in (1, 4)]
    assert kept[0] < kept[1]
    one, many = (solve.found(chain, "--solver", "random", "--draws", str(draws)) for draws in (1, 200))
    assert many["objective"] <= one["objective"]


def test_random_graphs_have_the_exhaustive_optimum(solve: Command) -> None:
    random = Random(71)
    tried = 0
    while tried < 40:
        graph = random_graph(random, 9)
        if len(graph.sources) > 1 or len(graph.sinks) > 1:
            continue
        tried += 1
        count = len(graph)
        sizes = [random.randint(0, 20) for _ in range(count)]
        edges = [(int(str(tail)), int(str(head))) for tail, head in graph.edges]
        problem = problem_of(edges, sizes)
        found = solve.found(
            {
                "vertices": [{"id": v, "size": sizes[v]} for v in random.sample(range(count), count)],
                "edges": random.sample(edges, len(edges)),
                "source": graph.sources[0],
                "target": graph.sinks[0],
            }
        )
        optimum = EXHAUSTIVE.solve(problem).objective_bytes
        assert found["objective"] == found["lower_bound"] == optimum
        assert paper_objective(problem, CheckpointPlan(tuple(found["checkpoints"]))).total_bytes == optimum


def test_fractions_keep_their_unit(solve: Command) -> None:
    document = {**CHAIN, "vertices": [{"id": n, "size": s / 8} for n, s in enumerate([5, 4, 1, 4, 3])]}
    assert solve.found(document)["objective"] == 13 / 8


def test_given_checkpoints(solve: Command) -> None:
    found = solve.found(CHAIN, "--checkpoints", "3,1")
    assert (found["solver"], found["status"]) == ("manual", "feasible")
    assert (found["objective"], found["checkpoints"]) == (17, [0, 1, 3, 4])
    assert solve.found(CHAIN, "--checkpoints", "")["checkpoints"] == [0, 4]
    assert "checkpoint '7' is not one of the graph's 5 tensors" in solve.refusal(CHAIN, "--checkpoints", "7")
    assert "needs --checkpoints" in solve.refusal(CHAIN, "--solver", "manual")


def test_json_into_a_file(solve: Command, tmp_path: Path) -> None:
    code, out, err = solve(CHAIN, "--json", str(tmp_path / "found.json"))
    assert (code, out, err) == (0, "", "")
    assert json.loads((tmp_path / "found.json").read_text())["objective"] == 13
    assert solve.found(CHAIN, "--json", "-")["objective"] == 13
    solve.refusal(CHAIN, "--json", str(tmp_path / "nowhere" / "found.json"))


def test_time_limit_and_seed(solve: Command) -> None:
    sizes = [Random(n).randint(1, 1000) for n in range(300)]
    row = {
        "vertices": [{"id": n, "size": size} for n, size in enumerate(sizes)],
        "edges": [[n, n + 1] for n in range(299)],
        "source": 0,
        "target": 299,
    }
    hurried = solve.found(row, "--time-limit", "0")
    assert hurried["status"] == "feasible"
    assert hurried["lower_bound"] < hurried["objective"]
    drawn = [solve.found(row, "--solver", "random", "--seed", str(seed)) for seed in (1, 1, 2)]
    assert drawn[0]["checkpoints"] == drawn[1]["checkpoints"] != drawn[2]["checkpoints"]


def test_a_solver_rejects_unsuitable_graphs(solve: Command) -> None:
    ring = {
        "vertices": [{"id": name, "size": 1} for name in "0123"],
        "edges": [["0", "1"], ["0", "2"], ["1", "3"], ["2", "3"]],
        "source": "0",
        "target": "3",
    }
    for solver in ("lcg", "revolve", "bptt"):
        assert "vertex '0' branches into '1' and '2'" in solve.refusal(ring, "--solver", solver)
    assert "vertices 1 and 2 differ in size" in solve.refusal(CHAIN, "--solver", "revolve")
    assert "solver 'best' is not one of peak, acg, general" in solve.refusal(CHAIN, "--solver", "best")


@pytest.mark.parametrize(
    "document, message",
    [
        ("{", "is not JSON"),
        ("[]", "one JSON object"),
        ({"nodes": {}, "edges": []}, "no 'vertices'"),
        ({**CHAIN, "edges": [*CHAIN["edges"], [3, 1]]}, "cycle"),
        ({**CHAIN, "edges": [*CHAIN["edges"], [3, 9]]}, "names vertex 9"),
        ({**CHAIN, "vertices": [*CHAIN["vertices"], {"id": 0, "size": 1}]}, "given twice"),
        ({**CHAIN, "vertices": [*CHAIN["vertices"][:-1], {"id": 4, "size": -1}]}, "negative size"),
        ({**CHAIN, "vertices": [*CHAIN["vertices"][:-1], {"id": 4}]}, "no 'size'"),
        ({**CHAIN, "vertices": [*CHAIN["vertices"][:-1], {"id": 4, "size": "big"}]}, "size 'big'"),
        ({key: part for key, part in CHAIN.items() if key != "edges"}, "no 'edges'"),
        ({**CHAIN, "source": 9}, "the source names vertex 9"),
        ({**CHAIN, "target": "end"}, "the target names vertex 'end'"),
        ({**CHAIN, "source": 1}, "must come first"),
        ({**CHAIN, "target": 3}, "must come last"),
        ({**CHAIN, "edges": [[0, 1], [1, 4], [2, 3]]}, "not reached from the source"),
        ({**CHAIN, "edges": [[0, 1], [1, 2], [2, 4], [0, 3]]}, "does not reach the target"),
    ],
)
def test_bad_graphs_are_one_line(solve: Command, document: Any, message: str) -> None:
    assert message in solve.refusal(document)


def test_a_missing_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("solve", "nowhere.json") == 2
    assert capsys.readouterr().err == "onnxgc: cannot read the graph 'nowhere.json': No such file or directory\n"


def test_a_budget_below_the_kept_outputs_is_rejected(solve: Command) -> None:
    nodes = [{"id": number, "size": 5, "duration": 1} for number in range(3)]
    code, out, err = solve({"nodes": nodes, "edges": []}, "--budget", "10")
    assert (code, out) == (3, "")
    assert err == "onnxgc: no sequence fits 10: unread outputs are kept, 15 in total; give at least that\n"
