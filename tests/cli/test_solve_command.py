import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.cli.command import Done, run_command


def chain_of(*sizes: float) -> dict[str, Any]:
    last = len(sizes) - 1
    vertices = [{"id": number, "size": size} for number, size in enumerate(sizes)]
    return {"vertices": vertices, "edges": [[n, n + 1] for n in range(last)], "source": 0, "target": last}


CHAIN = chain_of(5, 4, 1, 4, 3)


class Command:
    def __init__(self, folder: Path) -> None:
        self.graph = folder / "graph.json"

    def __call__(self, document: Any, *options: str, code: int = 0) -> Done:
        self.graph.write_text(document if isinstance(document, str) else json.dumps(document))
        return run_command("solve", self.graph, *options, code=code)

    def found(self, document: Any, *options: str) -> dict[str, Any]:
        done = self(document, *options)
        assert done.err == ""
        result: dict[str, Any] = json.loads(done.out)
        return result

    def refusal(self, document: Any, *options: str, code: int = 2) -> str:
        done = self(document, *options, code=code)
        assert done.out == ""
        return done.err


@pytest.fixture
def solve(tmp_path: Path) -> Command:
    return Command(tmp_path)


def test_figures_of_a_chain(solve: Command):
    found = solve.found(CHAIN)
    assert found.pop("seconds") >= 0
    assert found == {
        "solver": "acg", "status": "optimal", "objective": 13, "lower_bound": 13, "peak": 13, "sum": 13,
        "checkpoints": [0, 2, 4],
    }  # fmt: skip


def test_interior_only_leaves_source_and_target_out(solve: Command):
    found = solve.found(CHAIN, "--interior-only")
    assert (found["objective"], found["lower_bound"], found["checkpoints"]) == (5, 5, [2])
    single = {"vertices": [{"id": "x", "size": 4}], "edges": [], "source": "x", "target": "x"}
    assert solve.found(single)["objective"] == 4
    assert solve.found(single, "--interior-only")["objective"] == 0


def test_objectives(solve: Command):
    document = chain_of(0, 1, 1, 1, 9, 7, 0)
    document["edges"].append([1, 4])
    assert solve.found(document, "--objective", "paper")["solver"] == "acg"
    everywhere = solve.found(document, "--solver", "exhaustive", "--objective", "general")
    independent = solve.found(document, "--solver", "exhaustive")
    assert everywhere["objective"] <= independent["objective"]
    kept, released = (solve.found(chain_of(*[1] * 102), "--objective", name) for name in ("paper", "peak"))
    assert released["solver"] == "peak"
    assert 0 < released["lower_bound"] <= released["objective"] < kept["objective"]
    assert "has the objective 'paper', not 'peak'" in solve.refusal(document, "--solver", "acg", "--objective", "peak")


def test_numbers_of_single_solvers(solve: Command):
    chain = chain_of(*[2] * 13)
    kept = [len(solve.found(chain, "--solver", "revolve", "--slots", str(slots))["checkpoints"]) for slots in (1, 4)]
    assert kept[0] < kept[1]
    one, many = (solve.found(chain, "--solver", "random", "--draws", str(draws)) for draws in (1, 200))
    assert many["objective"] <= one["objective"]


def test_fractions_keep_their_unit(solve: Command):
    assert solve.found(chain_of(5 / 8, 4 / 8, 1 / 8, 4 / 8, 3 / 8))["objective"] == 13 / 8


def test_given_checkpoints(solve: Command):
    found = solve.found(CHAIN, "--checkpoints", "3,1")
    assert (found["solver"], found["status"]) == ("manual", "feasible")
    assert (found["objective"], found["checkpoints"]) == (17, [0, 1, 3, 4])
    assert solve.found(CHAIN, "--checkpoints", "")["checkpoints"] == [0, 4]
    assert "checkpoint '7' is not one of the graph's 5 tensors" in solve.refusal(CHAIN, "--checkpoints", "7")
    assert "needs --checkpoints" in solve.refusal(CHAIN, "--solver", "manual")


def test_json_into_a_file(solve: Command, tmp_path: Path):
    done = solve(CHAIN, "--json", str(tmp_path / "found.json"))
    assert (done.out, done.err) == ("", "")
    assert json.loads((tmp_path / "found.json").read_text())["objective"] == 13
    assert solve.found(CHAIN, "--json", "-")["objective"] == 13
    solve.refusal(CHAIN, "--json", str(tmp_path / "nowhere" / "found.json"))


def test_time_limit_and_seed(solve: Command):
    row = chain_of(*(Random(n).randint(1, 1000) for n in range(300)))
    hurried = solve.found(row, "--time-limit", "0")
    assert hurried["status"] == "feasible"
    assert hurried["lower_bound"] < hurried["objective"]
    drawn = [solve.found(row, "--solver", "random", "--seed", str(seed)) for seed in (1, 1, 2)]
    assert drawn[0]["checkpoints"] == drawn[1]["checkpoints"] != drawn[2]["checkpoints"]


def test_a_solver_rejects_unsuitable_graphs(solve: Command):
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
        ({"nodes": {}, "edges": []}, "no 'vertices'"),
        ({**CHAIN, "edges": [*CHAIN["edges"], [3, 1]]}, "cycle"),
        ({key: part for key, part in CHAIN.items() if key != "edges"}, "no 'edges'"),
    ],
)
def test_bad_graphs_are_one_line(solve: Command, document: Any, message: str):
    assert message in solve.refusal(document)


def test_a_missing_file():
    assert (
        run_command("solve", "nowhere.json", code=2).err
        == "onnxgc: cannot read the graph 'nowhere.json': No such file or directory\n"
    )


def test_a_budget_below_the_kept_outputs_is_rejected(solve: Command):
    nodes = [{"id": number, "size": 5, "duration": 1} for number in range(3)]
    err = solve.refusal({"nodes": nodes, "edges": []}, "--budget", "10", code=3)
    assert err == "onnxgc: no sequence fits 10: unread outputs are kept, 15 in total; give at least that\n"
