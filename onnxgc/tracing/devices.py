"""Devices by their data sheets: estimated durations without a measurement."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from onnxgc.errors import DurationError
from onnxgc.tracing.durations import Work

# Share of the data sheet's figures that kernels reach. Assumed equal for all devices, so that the data sheet
# alone determines which operators are compute-bound.
COMPUTE_EFFICIENCY = 0.7
BANDWIDTH_EFFICIENCY = 0.9
# Time of ONNX Runtime between two kernels on CUDA, and the share of the memory's bandwidth that reductions
# reach that fall to cuDNN. Both are fitted to the ten steps of an H200 in benchmarks/gpu/nvidia-h200.json;
# the largest deviation is in benchmarks/card.json.
_CUDA_LAUNCH_SECONDS = 1.8e-6
_SLOW_REDUCTION_SHARE = 1 / 67


@dataclass(frozen=True, slots=True)
class Device:
    """A roofline model: an operator's duration is its computing time or its transfer time, if longer.

    `flops_per_second` are the peak rates of dense matrix products by numpy name of the element type; types
    without an entry have float32's. `launch_seconds` are added for each operator. `memory_bytes` is 0 if the
    device stands for several.
    """

    name: str
    flops_per_second: Mapping[str, float]
    bytes_per_second: float
    launch_seconds: float
    source: str
    slow_reduction_share: float = 1.0
    memory_bytes: int = 0

    def duration_ns(self, work: Work) -> int:
        """Nanoseconds of one run of an operator."""
        if work.is_free:
            return 0
        peak = self.flops_per_second.get(work.dtype, self.flops_per_second["float32"])
        computing = work.flops / (COMPUTE_EFFICIENCY * peak)
        moving = work.moved_bytes / (BANDWIDTH_EFFICIENCY * self.bytes_per_second)
        moving = max(moving, work.slow_bytes / (self.slow_reduction_share * self.bytes_per_second))
        return round(1e9 * (max(computing, moving) + self.launch_seconds))


def device(name: str) -> Device:
    """The device with a short name (`h100`) or full name, ignoring case, spaces and hyphens.

    Raises:
        DurationError: no device has that name.

    >>> device("H100").name
    'NVIDIA H100 SXM'
    """
    by_name = {_plain(known): found for known, found in DEVICES.items()}
    by_name |= {_plain(found.name): found for found in DEVICES.values()}
    found = by_name.get(_plain(name)) or by_name.get(_plain(f"NVIDIA {name}"))
    if found is not None:
        return found
    near = difflib.get_close_matches(_plain(name), DEVICES, 1)
    suggestion = f"; did you mean '{near[0]}'?" if near else ""
    raise DurationError(f"unknown device '{name}'{suggestion} (known: {', '.join(sorted(DEVICES))})")


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _cuda(
    name: str, float32: float, half: float, float64: float, gigabytes: float, source: str, memory: int, **other: float
) -> Device:
    """A GPU by its figures in TFLOPS and GB/s, and its memory in GB.

    float32 is the rate of TF32 if the GPU has it, since ONNX Runtime uses TF32 by default. `other` gives
    bfloat16 if its rate differs from float16's.
    """
    rates = {"float32": float32, "float16": half, "bfloat16": half, "float64": float64, **other}
    return Device(
        name,
        {dtype: 1e12 * rate for dtype, rate in rates.items()},
        1e9 * gigabytes,
        _CUDA_LAUNCH_SECONDS,
        source,
        _SLOW_REDUCTION_SHARE,
        memory * 10**9,
    )


# Rates with sparsity are halved to dense ones. float64 rates are without tensor cores.
DEVICES: Mapping[str, Device] = {
    "h200": _cuda(
        "NVIDIA H200 SXM", 494.5, 989.5, 34, 4800, "NVIDIA H200 Tensor Core GPU data sheet, dense rates", 141
    ),
    "h100": _cuda("NVIDIA H100 SXM", 494.5, 989.5, 34, 3350, "NVIDIA H100 Tensor Core GPU data sheet, dense rates", 80),
    "a100": _cuda(
        "NVIDIA A100 SXM 80GB", 156, 312, 9.7, 2039, "NVIDIA A100 Tensor Core GPU data sheet, dense rates", 80
    ),
    "l4": _cuda(
        "NVIDIA L4",
        60,
        121,
        30.3 / 64,
        300,
        "NVIDIA L4 Tensor Core GPU data sheet, dense rates; float64 a 64th of float32 (NVIDIA Ada white paper)",
        24,
    ),
    "a10": _cuda(
        "NVIDIA A10",
        62.5,
        125,
        31.2 / 64,
        600,
        "NVIDIA A10 Tensor Core GPU data sheet, dense rates; float64 a 64th of float32 (NVIDIA GA102 white paper)",
        24,
    ),
    "v100": _cuda(
        "NVIDIA V100 SXM2",
        15.7,
        125,
        7.8,
        900,
        "NVIDIA V100 Tensor Core GPU data sheet; no TF32 and no bfloat16",
        32,
        bfloat16=15.7,
    ),
    "t4": _cuda(
        "NVIDIA T4",
        8.1,
        65,
        8.1 / 32,
        320,
        "NVIDIA T4 Tensor Core GPU data sheet; no TF32 and no bfloat16; float64 a 32nd of float32 (NVIDIA "
        "Turing white paper); 256 bits of memory at 10 Gbit/s",
        16,
        bfloat16=8.1,
    ),
    "rtx4090": _cuda(
        "NVIDIA GeForce RTX 4090",
        82.6,
        165.2,
        82.6 / 64,
        1008,
        "NVIDIA Ada GPU architecture white paper, dense rates that sum in float32",
        24,
    ),
    "rtx3090": _cuda(
        "NVIDIA GeForce RTX 3090",
        35.6,
        71,
        35.6 / 64,
        936,
        "NVIDIA Ampere GA102 GPU architecture white paper, dense rates that sum in float32",
        24,
    ),
    "cpu": Device(
        "one core of a CPU",
        {"float32": 96e9, "float64": 48e9},
        25.6e9,
        5e-6,
        "two fused multiply-adds of 256 bits a cycle at 3 GHz (Intel and AMD optimization manuals) and one "
        "channel of DDR4-3200 (JEDEC); all rates grow with cores and channels alike, so durations keep "
        "their proportions",
    ),
}
