"""Gradient checkpointing as a pass of onnx_ir.

Raises:
    RuntimeUnavailableError: onnx_ir is not installed.
"""

import inspect
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from onnxgc.errors import RuntimeUnavailableError

if find_spec("onnx_ir") is None:
    raise RuntimeUnavailableError("onnxgc.passes needs onnx_ir, which is not installed: pip install 'onnxgc[ir]'")

import onnx_ir as ir

from onnxgc.api import OptimizeResult, optimize
from onnxgc.emission.plan_files import METADATA_KEY

__all__ = ["Checkpointing"]

_FILE_OPTIONS = ("source", "output", "external_data", "dry_run", "state", "evaluation")


class Checkpointing(ir.passes.FunctionalPass):
    """Replaces a forward model by a training graph that needs less memory, with gradients as outputs.

    Options are those of `onnxgc.optimize`, except those of files: `Checkpointing(budget="60%")`. The plan is
    the order of nodes, so this pass comes last: passes that sort nodes or merge equal ones undo it.

    Attributes:
        options: options for `onnxgc.optimize`.
        result: its result for the last model, or None before the first.
    """

    def __init__(self, **options: Any) -> None:
        """See `onnxgc.optimize`.

        Raises:
            TypeError: an option is unknown.
        """
        known = inspect.signature(optimize).parameters.keys() - set(_FILE_OPTIONS)
        unknown = [name for name in options if name not in known]
        if unknown:
            raise TypeError(f"'{unknown[0]}' is not an option of this pass; known: {', '.join(sorted(known))}")
        self.options: Mapping[str, Any] = options
        self.result: OptimizeResult | None = None

    @property
    def report(self) -> Mapping[str, Any]:
        """The figures of the last model, as `onnxgc optimize --json` writes them; empty before the first."""
        return {} if self.result is None else self.result.report

    def requires(self, model: ir.Model) -> None:
        """The model is a forward model.

        Raises:
            PreconditionError: it is a training graph.
        """
        if METADATA_KEY in model.metadata_props:
            raise ir.passes.PreconditionError(
                "the model is a training graph; give the forward model that it was made from"
            )

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """The training graph of a forward model, which is not modified.

        Raises:
            OnnxgcError: one line that states what is wrong, where, and what to do.
        """
        self.result = optimize(model, **self.options)
        return ir.passes.PassResult(ir.from_proto(self.result.training_graph.model), modified=True)

    def ensures(self, model: ir.Model) -> None:
        """The result contains its plan, and returns a gradient for each parameter.

        Raises:
            PostconditionError: it does not.
        """
        assert self.result is not None, "`call` comes first"
        returned = {value.name for value in model.graph.outputs}
        gradients = self.result.training_graph.gradient_of
        missing = [name for name, gradient in gradients.items() if gradient not in returned]
        if missing or METADATA_KEY not in model.metadata_props:
            fault = f"has no gradient of '{missing[0]}'" if missing else "does not contain its plan"
            raise ir.passes.PostconditionError(f"the training graph {fault}")
