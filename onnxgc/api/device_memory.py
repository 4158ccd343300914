"""All memory that a training step needs on a device: weights, states, inputs, the step, and the runtime.

Simulated peaks leave out what is there before a step. A device also holds the runtime's own data, and its
allocator does not fill every block.
"""

from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction

from onnxgc.errors import BudgetError, BudgetFormError, DurationError
from onnxgc.planning.memory_budget import Budget, parse_budget
from onnxgc.tracing.devices import device as find_device
from onnxgc.tracing.step_graph import TrainingStep

RUNTIME_BYTES = {"cpu": 0, "cuda": 640 * 2**20}
"""The context and the libraries of a process on a device, by provider."""
MARGIN = {"cpu": Fraction(1, 10), "cuda": Fraction(15, 100)}
"""The allocator's slack as a share of the step's peak, on CUDA with workspaces of convolutions.

Measured slack on a CPU is at most 9% (benchmarks/peaks.json). Of the ten steps that an H200 ran, in the forms
for CPUs, seven stay within; those of vgg16 and the planned one of inception_v3 took up to 1.36 times as much.
"""
_BLOCK_BYTES = 256
"""The allocator rounds each block up to a multiple of these bytes."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes on a device by kind, beside the step's own peak.

    `weights` are parameters, statistics and constants; `inputs` includes labels; `rounding` is the most that the
    allocator adds to the step's blocks, which matters for steps of kilobytes.
    """

    weights: int
    optimizer_state: int
    inputs: int
    runtime: int
    margin: Fraction
    rounding: int = 0

    @classmethod
    def of_step(cls, step: TrainingStep) -> "DeviceMemory":
        model = step.model
        state = 0 if step.updates is None else step.updates.state_bytes
        return cls(
            sum(weight.type.size_bytes for weight in model.weights.values()),
            state,
            sum(model.types[name].size_bytes for name in (*model.inputs, *model.targets)),
            RUNTIME_BYTES[model.provider],
            MARGIN[model.provider],
            _BLOCK_BYTES * len(step.graph.operators),
        )

    @property
    def fixed_bytes(self) -> int:
        """All but the step and its margin."""
        return self.weights + self.optimizer_state + self.inputs + self.runtime

    def margin_of(self, peak_bytes: int) -> int:
        """The margin of a step with this simulated peak."""
        return int(peak_bytes * self.margin) + self.rounding

    def total(self, peak_bytes: int) -> int:
        """Bytes of a step with this simulated peak."""
        return self.fixed_bytes + peak_bytes + self.margin_of(peak_bytes)

    def budget_within(self, device_bytes: int) -> Budget:
        """The budget of a step on a device with this memory, with the optimizer's state as in `--budget`.

        Raises:
            BudgetError: nothing is left for the step.
        """
        left = int((device_bytes - self.fixed_bytes - self.rounding) / (1 + self.margin))
        if left <= 0:
            raise BudgetError(
                f"no plan fits a device of {device_bytes:,} bytes: weights take {self.weights:,}, the "
                f"optimizer's state {self.optimizer_state:,}, inputs {self.inputs:,} and the runtime "
                f"{self.runtime:,}; give more memory, a smaller batch (--input-shapes) or freeze a part"
            )
        return Budget(size_bytes=left + self.optimizer_state, reserved_bytes=self.optimizer_state)


def parse_device_memory(given: str | float) -> int:
    """Bytes from a size such as 8GiB, or from the name of a device by its data sheet.

    >>> parse_device_memory("24GiB"), parse_device_memory("a100")
    (25769803776, 80000000000)

    Raises:
        BudgetFormError: it is neither.
    """
    if isinstance(given, float) and given >= 1:
        given = round(given)
    if isinstance(given, str):
        try:
            memory = find_device(given).memory_bytes
        except DurationError:
            memory = None
        if memory:
            return memory
    size = None
    with suppress(BudgetFormError):
        size = parse_budget(given).size_bytes
    if size is None:
        raise BudgetFormError(
            f"'{given}' is not the memory of a device; write a size such as 8GiB, or a device such as a100"
        )
    return size
