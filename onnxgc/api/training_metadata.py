"""The metadata of a training file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

import onnx

from onnxgc.api.read_options import ReadOptions
from onnxgc.emission.plan_files import METADATA_KEY, plan_from_json
from onnxgc.errors import ModelFileError
from onnxgc.model.core.ir import Array
from onnxgc.model.core.stored_weights import StoredWeight
from onnxgc.model.files.load import load_proto
from onnxgc.planning.plan import CheckpointPlan


@dataclass(frozen=True, slots=True)
class TrainingMetadata:
    """The metadata of a training file."""

    proto: onnx.ModelProto
    plan: CheckpointPlan
    options: ReadOptions
    peak_bytes: int
    values: Mapping[str, Array]

    @property
    def loss(self) -> str:
        return str(self.proto.graph.output[0].name)

    @classmethod
    def of(cls, training: str | os.PathLike[str]) -> TrainingMetadata:
        proto, folder = load_proto(training)
        properties = {entry.key: entry.value for entry in proto.metadata_props}
        try:
            decision = plan_from_json(json.loads(properties[METADATA_KEY]), f"'{os.fspath(training)}'")
            options = ReadOptions.from_json(properties["onnxgc.options"])
            peak = int(properties["onnxgc.simulated_peak_bytes"])
        except (KeyError, ValueError, TypeError) as error:
            raise ModelFileError(
                f"'{os.fspath(training)}' was not written by onnxgc: its metadata is missing or invalid "
                f"({error}); write it with `onnxgc optimize`"
            ) from error
        fed = {value.name for value in proto.graph.input}
        values = {
            tensor.name: StoredWeight(tensor, folder).load()
            for tensor in proto.graph.initializer
            if tensor.name in fed
        }
        return cls(proto, decision, options, peak, values)
