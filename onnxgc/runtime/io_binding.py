"""Sessions whose inputs and outputs stay where they are from run to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import helper

from onnxgc.errors import RuntimeFailedError
from onnxgc.model.core.ir import Array, TensorType
from onnxgc.runtime.ort import load_onnxruntime, make_session

if TYPE_CHECKING:
    import onnxruntime


class DeviceArrays:
    """Arrays on a device, by name; on the CPU they are NumPy's own memory."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._values: dict[str, onnxruntime.OrtValue] = {}
        self._arrays: dict[str, Array] = {}
        """On the CPU, the memory that the values show."""

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def value(self, name: str) -> onnxruntime.OrtValue:
        return self._values[name]

    def array(self, name: str) -> Array:
        """What is held: itself on the CPU, else a copy."""
        if name in self._arrays:
            return self._arrays[name]
        found: Array = self._values[name].numpy()
        return found

    def put(self, name: str, array: Array) -> None:
        """A new array, or other contents for one that is there, which stays where it is."""
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

    `held` are inputs that are bound once, `replaced` maps outputs to the held input whose memory they are
    written to. `fetched` outputs have memory of their own, which every run overwrites.
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
    ) -> None:
        self._arrays = arrays
        self._session = make_session(graph, providers=providers, threads=threads, is_silent=True)
        self._binding = self._session.io_binding()
        self._fetched = DeviceArrays(arrays.device)
        self._fed = DeviceArrays(arrays.device)
        self._alive: dict[str, Array] = {}
        """What the current run reads of NumPy's memory."""
        for name in held:
            self._binding.bind_ortvalue_input(name, arrays.value(name))
        for output, name in replaced.items():
            self._binding.bind_ortvalue_output(output, arrays.value(name))
        for output, kind in fetched.items():
            self._fetched.put_zeros(output, kind)
            self._binding.bind_ortvalue_output(output, self._fetched.value(output))

    def run(self, feeds: Mapping[str, Array]) -> None:
        """One run with these values for all other inputs.

        Raises:
            RuntimeFailedError: ONNX Runtime refuses or stops.
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
            self._session.run_with_iobinding(self._binding)
        except Exception as error:
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise RuntimeFailedError(f"the training step does not run on ONNX Runtime: {reason}") from error

    def result(self, name: str) -> Array:
        """A copy of what the last run has left in an output that is fetched."""
        return np.array(self._fetched.array(name))
