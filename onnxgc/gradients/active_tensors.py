"""Active tensors: those that need a gradient in backward."""

from collections.abc import Container, Sequence

from onnxgc.errors import NoParametersError, UnsupportedOperatorError
from onnxgc.model.core.draft import reads_of
from onnxgc.model.core.ir import Node, TrainableModel

_MAX_LISTED = 3


def active_tensors(model: TrainableModel, rules: Container[str], stops: Container[str]) -> frozenset[str]:
    """Floating tensors on a differentiable path from a parameter to the loss.

    `rules` are the operators with a gradient rule, `stops` those with a derivative of zero almost everywhere.

    Raises:
        UnsupportedOperatorError: names every node on such a path that has no rule.
        NoParametersError: no parameter reaches the loss.
    """
    useful = _ancestors_of(model, model.loss)
    active = set(model.parameters)
    missing: list[Node] = []
    for node in model.nodes:
        if node.once or node.rule in stops or not node.rule:
            continue
        if not any(name in active for name in reads_of(node)):
            continue
        floating = [name for name in node.outputs if name and model.types[name].is_floating]
        if not floating:
            continue
        if node.rule not in rules and any(name in useful for name in floating):
            missing.append(node)
        # Continue past a missing rule, so that one message lists all of them.
        active.update(floating)
    if missing:
        raise UnsupportedOperatorError(_missing_rules(missing))
    if model.loss not in active:
        raise NoParametersError(_unreached_loss(model, active, useful))
    return frozenset(active & useful)


def _ancestors_of(model: TrainableModel, tensor: str) -> set[str]:
    useful = {tensor}
    for node in reversed(model.nodes):
        if any(name in useful for name in node.outputs):
            useful.update(reads_of(node))
    return useful


def _missing_rules(nodes: Sequence[Node]) -> str:
    by_rule: dict[str, list[str]] = {}
    for node in nodes:
        by_rule.setdefault(node.rule, []).append(node.label)
    listed = "; ".join(f"{rule} at {_first(list(dict.fromkeys(names)))}" for rule, names in sorted(by_rule.items()))
    return (
        f"no gradient rule for: {listed}; rewrite these operators as supported ones, "
        "or pass --freeze so that no parameter before them trains"
    )


def _unreached_loss(model: TrainableModel, active: set[str], useful: set[str]) -> str:
    stopping = [
        node.location
        for node in model.nodes
        if not useful.isdisjoint(node.outputs)
        and not active.isdisjoint(reads_of(node))
        and active.isdisjoint(node.outputs)
    ]
    if stopping:
        return (
            f"no trainable parameter reaches the loss '{model.loss}': the gradient stops at "
            f"{_first(stopping)}, whose result is integer or piecewise constant; compute the loss from its "
            "input"
        )
    return (
        f"no trainable parameter reaches the loss '{model.loss}'; "
        "run `onnxgc inspect` to see the role of each weight, and name some with --trainable"
    )


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more
