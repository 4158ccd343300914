"""Sessions whose inputs and outputs keep their memory from run to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import helper

from onnxgc.errors import RuntimeFailedError, RuntimeUnavailableError
from onnxgc.model.core.ir import Array, TensorType
from onnxgc.runtime.execution_check import keeps_file_order
from onnxgc.runtime.ort import load_onnxruntime, make_session

if TYPE_CHECKING:
    import onnxruntime


class DeviceArrays:
    """Arrays on a device, by name; on the CPU they share memory with NumPy."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._values: dict[str, onnxruntime.OrtValue] = {}
        self._arrays: dict[str, Array] = {}
        """On the CPU, the memory behind the values."""

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def value(self, name: str) -> onnxruntime.OrtValue:
        return self._values[name]

    def array(self, name: str) -> Array:
        """The array itself on the CPU, a copy from other devices."""
        if name in self._arrays:
            return self._arrays[name]
        found: Array = self._values[name].numpy()
        return found

    def put(self, name: str, array: Array) -> None:
        """Adds an array, or overwrites the contents of an existing one in place."""
        if name in self._arrays:
            np.copyto(self._arrays[name], array)
        elif name in self._values:
            self._values[name].update_inplace(np.asarray(array, order="C"))
        else:
            held = np.array(array, order="C")
            self._values[name] = load_onnxruntime().OrtValue.ortvalue_from_numpy(held, self.device, 0)
            if self.device == "cpu":
                self._arrays[name] = held

    def put_zeros(self, name: str, kind: TensorType) -> None:
        self.put(name, np.zeros(kind.shape, helper.tensor_dtype_to_np_dtype(kind.dtype)))

    def address(self, name: str) -> int:
        return int(self._values[name].data_ptr())


class BoundSession:
    """A session that reads and writes arrays of a device in place.

    Inputs in `held` are bound once. `replaced` maps outputs to the held input whose memory they overwrite.
    Outputs in `fetched` have separate memory, which every run overwrites. With `cuda_graph`, runs after the
    first replay its kernels.
    """

    def __init__(
        self,
        graph: onnx.ModelProto,
        arrays: DeviceArrays,
        *,
        held: Sequence[str],
        replaced: Mapping[str, str],
        fetched: Mapping[str, TensorType],
        providers: Sequence[str],
        threads: int | None,
        cuda_graph: bool = False,
    ) -> None:
        self._arrays = arrays
        self._session = make_session(graph, providers=providers, threads=threads, cuda_graph=cuda_graph, is_silent=True)
        self.keeps_order = keeps_file_order(self._session, graph)
        """Whether the session runs the nodes in the order of the graph."""
        if cuda_graph:
            self._check_inputs()
        self._overwritten = tuple(dict.fromkeys(replaced.values()))
        self._is_captured = not cuda_graph
        self._binding = self._session.io_binding()
        self._fetched = DeviceArrays(arrays.device)
        self._fed = DeviceArrays(arrays.device)
        self._alive: dict[str, Array] = {}
        """NumPy arrays that the current run reads."""
        for name in held:
            self._binding.bind_ortvalue_input(name, arrays.value(name))
        for output, name in replaced.items():
            self._binding.bind_ortvalue_output(output, arrays.value(name))
        for output, kind in fetched.items():
            self._fetched.put_zeros(output, kind)
            self._binding.bind_ortvalue_output(output, self._fetched.value(output))

    def run(self, feeds: Mapping[str, Array]) -> None:
        """Runs once with these values for all other inputs.

        Raises:
            RuntimeFailedError: ONNX Runtime rejects the inputs or fails.
        """
        for name, value in feeds.items():
            if self._fed.device == "cpu":
                self._alive[name] = np.asarray(value, order="C")
                self._binding.bind_cpu_input(name, self._alive[name])
            else:
                known = name in self._fed
                self._fed.put(name, value)
                if not known:
                    self._binding.bind_ortvalue_input(name, self._fed.value(name))
        try:
            if not self._is_captured:
                self._capture()
            self._session.run_with_iobinding(self._binding)
        except Exception as error:
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise RuntimeFailedError(f"the training step does not run on ONNX Runtime: {reason}") from error

    def _check_inputs(self) -> None:
        """Checks that kernels read all inputs on the card: a replay does not read those on the CPU again."""
        places = zip(self._session.get_inputs(), self._session.get_input_memory_infos(), strict=True)
        if host := [value.name for value, memory in places if memory.name == "Cpu"]:
            raise RuntimeUnavailableError(
                f"the model cannot run as a CUDA graph: its input '{host[0]}' is read on the CPU"
            )

    def _capture(self) -> None:
        """Captures the CUDA graph; the runs that ONNX Runtime needs for it leave the arrays unchanged."""
        before = {name: np.array(self._arrays.array(name)) for name in self._overwritten}
        self._session.run_with_iobinding(self._binding)
        for name, array in before.items():
            self._arrays.put(name, array)
        self._is_captured = True

    def result(self, name: str) -> Array:
        """A copy of a fetched output of the last run."""
        return np.array(self._fetched.array(name))
