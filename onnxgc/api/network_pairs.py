"""One network in several files: matched tensors, memory of each file, and transferred plans."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnxgc.api.optimize_report import MAX_LISTED
from onnxgc.api.plan_transfer import Network, transfer_between
from onnxgc.api.step_planning import traced_step_with_plan
from onnxgc.matching.match import Matching, Reason, Unmatched, match
from onnxgc.matching.network_view import Pair
from onnxgc.planning.plan import CheckpointPlan
from onnxgc.planning.schedule import Schedule, StepGraph
from onnxgc.planning.simulate import MemoryProfile, live_at_peak
from onnxgc.report.data.compare_report import CheckpointFates, FileReport, NetworksReport, PairReport, PeakFigures
from onnxgc.report.data.optimize_report import TensorFigures


def compare_networks(networks: Sequence[Network]) -> tuple[NetworksReport, dict[str, CheckpointPlan]]:
    """Compare the first file with each of the others, and transfer its plan to them.

    Raises:
        ShapeError: the files have different batch sizes.
    """
    first, *others = networks
    plans = {first.name: first.planned.solution.plan}
    pairs: list[PairReport] = []
    for other in others:
        pair, plans[other.name] = _pair(first, other, match(first.model, other.model))
        pairs.append(pair)
    files = [_file_figures(network) for network in networks]
    return {"kind": "networks", "files": files, "pairs": pairs}, plans


def _file_figures(network: Network) -> FileReport:
    planned, model = network.planned, network.model
    regular = _peak(planned.regular_schedule, planned.traced.step.graph, planned.regular_profile)
    own = _peak(planned.schedule, planned.step.graph, planned.profile)
    read = _read_by_backward(network)
    live = (item["tensor"] for side in (regular, own) for item in side["largest_at_peak"])
    return {
        "model": network.name,
        "inputs": {name: list(model.types[name].shape) for name in model.inputs},
        "vertices": len(planned.traced.problem.graph.vertices),
        "operators": len({node.origin for node in model.nodes}),
        "read_by_backward": {"count": len(read), "bytes": sum(read.values())},
        "regular": regular,
        "planned": {
            "solver": planned.solution.solver,
            **own,
            "checkpoints": len(planned.solution.plan.checkpoints),
            "checkpoint_bytes": planned.objective.checkpoint_bytes,
        },
        "modules": planned.modules_of([*read, regular["peak_step"], *live]),
        "is_rebatched": bool(network.note),
        "notes": [*filter(None, [network.note]), *model.notes],
    }


def _peak(schedule: Schedule, graph: StepGraph, profile: MemoryProfile) -> PeakFigures:
    live = live_at_peak(schedule, graph, profile)[:MAX_LISTED]
    return {
        "simulated_peak_bytes": profile.peak_bytes,
        "peak_step": profile.peak_operator,
        "largest_at_peak": [{"tensor": name, "bytes": size} for name, size in live],
    }


def _pair(one: Network, other: Network, matching: Matching) -> tuple[PairReport, CheckpointPlan]:
    unmatched_a, unmatched_b = (
        {unmatched.tensor: unmatched for unmatched in side} for side in (matching.unmatched_a, matching.unmatched_b)
    )
    here = _MatchedSide(one, other, counterparts_of(one, other, matching.of_a), unmatched_a)
    there = _MatchedSide(other, one, counterparts_of(other, one, matching.of_b), unmatched_b)
    transfer = transfer_between(one, other, here.counterpart)
    plan, unadapted = (
        traced_step_with_plan(other.model, other.planned.traced, version, other.planned)
        for version in (transfer.plan, transfer.unadapted)
    )
    return {
        "a": one.name,
        "b": other.name,
        "is_same_network": matching.is_same_network,
        "has_same_biases": matching.has_same_biases,
        "differences": [{"what": other.what, "a": other.a, "b": other.b} for other in matching.differences],
        "matched_tensors": len(matching.pairs),
        "rearranged_tensors": sum(pair.is_rearranged for pair in matching.pairs),
        "multiplied_tensors": sum(pair.factor != 1 for pair in matching.pairs),
        "checkpoints": {"a": here.checkpoint_fates(), "b": there.checkpoint_fates()},
        "extras": [
            {
                "kind": extra.kind,
                "count_a": extra.count_a,
                "count_b": extra.count_b,
                "bytes_a": extra.bytes_a,
                "bytes_b": extra.bytes_b,
            }
            for extra in matching.extras
        ],
        "read_by_backward_here_only": {"a": here.read_here_only(), "b": there.read_here_only()},
        "part_behind": [_pair_names(pair) for pair in matching.last_from_inputs],
        "operators_behind": [[list(side) for side in both] for both in matching.operators_behind],
        "meet_again_at": [_pair_names(pair) for pair in matching.last_from_outputs],
        "carried_over": {
            "checkpoints": len(transfer.plan.checkpoints),
            "is_without_sequence": bool(one.planned.solution.plan.sequence),
            "lost": list(transfer.lost),
            "undecided": transfer.undecided,
            "decided": transfer.decided,
            "overruled": transfer.overruled,
            "simulated_peak_bytes": plan.profile.peak_bytes,
            "as_it_is_simulated_peak_bytes": unadapted.profile.peak_bytes,
            "own_simulated_peak_bytes": other.planned.profile.peak_bytes,
            "regular_simulated_peak_bytes": other.planned.regular_profile.peak_bytes,
        },
    }, transfer.plan


def _pair_names(pair: Pair) -> list[str]:
    return [pair.a, pair.b]


@dataclass(frozen=True, slots=True)
class _MatchedSide:
    """A file of a pair.

    `counterpart` maps its vertices to matching vertices of the other file; `unmatched` are tensors by name.
    """

    own: Network
    other: Network
    counterpart: Mapping[str, str]
    unmatched: Mapping[str, Unmatched]

    def checkpoint_fates(self) -> CheckpointFates:
        """The fates of this file's own checkpoints in the other file."""
        kept_there = set(self.other.planned.solution.plan.checkpoints)
        unmatched: dict[Reason, list[str]] = {reason: [] for reason in Reason}
        same = both = 0
        checkpoints = [str(vertex) for vertex in self.own.planned.solution.plan.checkpoints]
        for vertex in checkpoints:
            if vertex in self.counterpart:
                same += 1
                both += self.counterpart[vertex] in kept_there
            else:
                unmatched[self._why_unmatched(vertex).reason].append(vertex)
        return {
            "count": len(checkpoints),
            "same_tensor": same,
            "kept_by_both": both,
            "ambiguous": unmatched[Reason.AMBIGUOUS],
            "one_side": unmatched[Reason.ONE_SIDE],
            "parted": unmatched[Reason.PARTED],
        }

    def read_here_only(self) -> list[TensorFigures]:
        """Tensors that backward reads and the other file does not contain, the largest first."""
        read = _read_by_backward(self.own)
        here_only = [vertex for vertex in read if vertex not in self.counterpart]
        return [
            {"tensor": vertex, "bytes": read[vertex], "detail": self._why_unmatched(vertex).detail}
            for vertex in sorted(here_only, key=lambda vertex: (-read[vertex], vertex))
        ]

    def _why_unmatched(self, vertex: str) -> Unmatched:
        tensors = (vertex, *self.own.planned.traced.problem.joint().members[vertex])
        return min(
            (self.unmatched[tensor] for tensor in tensors if tensor in self.unmatched),
            key=lambda unmatched: list(Reason).index(unmatched.reason),
            default=Unmatched(vertex, Reason.ONE_SIDE, "its counterpart cannot be kept"),
        )


def _read_by_backward(network: Network) -> dict[str, int]:
    """Vertices whose tensors backward reads, with their bytes: the baseline's kept activations."""
    traced = network.planned.traced
    read = {
        traced.vertex_of[name]
        for chunk in traced.step.graph.chunks
        for operator in chunk
        for name in operator.inputs
        if name in traced.vertex_of
    }
    return {
        str(vertex): traced.problem.size_bytes(vertex) for vertex in traced.problem.graph.vertices if vertex in read
    }


def counterparts_of(own: Network, other: Network, matched: Mapping[str, str]) -> dict[str, str]:
    """The matching vertex of the other file for each vertex that has one."""
    counterparts: dict[str, str] = {}
    for vertex, tensors in own.planned.traced.problem.joint().members.items():
        # First the tensor that names the vertex: the others are its views and origins.
        for tensor in (str(vertex), *tensors):
            there = other.planned.traced.vertex_of.get(matched.get(tensor, ""))
            if there is not None:
                counterparts[str(vertex)] = there
                break
    return counterparts
