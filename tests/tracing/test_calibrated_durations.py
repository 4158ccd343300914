import pytest

from onnxgc.tracing.calibrated_durations import Calibration, MeasuredOperator
from onnxgc.tracing.durations import Work

MB = 10**6
LAUNCH_NS = 5_000


def work(
    kind: str, moved_bytes: int, flops: int = 0, *, name: str = "new", origin: str = "", dtype: str = "float32"
) -> Work:
    return Work(name, origin or name, kind, dtype, flops, moved_bytes)


def calibration(*measured: tuple[Work, int]) -> Calibration:
    """A calibration with these operators and a small one, whose duration is the launch overhead."""
    operators = [MeasuredOperator(*found) for found in measured]
    small = MeasuredOperator(work("Sqrt", 256, 64, name="small"), LAUNCH_NS)
    return Calibration("net", "CPUExecutionProvider", "cpu", 1, "1.31", 5, (*operators, small))


def at_rate(amount: int, per_ns: float) -> int:
    return round(LAUNCH_NS + amount / per_ns)


def test_a_measured_duration_scales_with_the_work_at_another_batch_size():
    found, other = (work("Conv", 4 * MB, 900 * MB, name=name) for name in ("conv", "conv2"))
    calibrated = calibration((found, LAUNCH_NS + 6_000_000), (other, 9_000_000))
    assert calibrated.duration_ns(found) == LAUNCH_NS + 6_000_000
    assert calibrated.duration_ns(other) == 9_000_000
    larger = work("Conv", 8 * MB, 1800 * MB, name="conv")
    assert calibrated.duration_ns(larger) == LAUNCH_NS + 12_000_000
    assert calibrated.measured(larger) == MeasuredOperator(found, LAUNCH_NS + 6_000_000)
    assert calibrated.measured(work("Relu", 4 * MB, name="conv")) is None


def test_a_renamed_operator_is_found_by_its_origin():
    found = work("Conv", 4 * MB, 900 * MB, name="conv/renamed", origin="conv")
    calibrated = calibration((found, 6_000_000))
    assert calibrated.duration_ns(work("Conv", 4 * MB, 900 * MB, name="conv")) == 6_000_000


def test_a_backward_product_has_the_rate_of_its_forward_product():
    """Not the rate of its kind: small convolutions have lower rates."""
    slow = work("Conv", 4 * MB, 100 * MB, name="depthwise")
    fast = work("MatMul", 4 * MB, 900 * MB, name="dense")
    calibrated = calibration((slow, at_rate(100 * MB, 5)), (fast, at_rate(900 * MB, 100)))
    gradient = work("ConvTranspose", 6 * MB, 200 * MB, origin="depthwise")
    assert calibrated.duration_ns(gradient) == at_rate(200 * MB, 5)
    assert calibrated.duration_ns(work("Gemm", 6 * MB, 200 * MB, origin="dense")) == at_rate(200 * MB, 100)


def test_an_operator_of_another_type_is_not_a_relative():
    found = work("MatMul", 4 * MB, 900 * MB, name="dense", dtype="float16")
    same = work("MatMul", 4 * MB, 900 * MB, name="other")
    calibrated = calibration((found, at_rate(900 * MB, 400)), (same, at_rate(900 * MB, 100)))
    assert calibrated.duration_ns(work("Gemm", 4 * MB, 900 * MB, origin="dense")) == at_rate(900 * MB, 100)


@pytest.mark.parametrize(
    "kind, amount, per_ns",
    [
        ("Gemm", 400 * MB, 100),
        ("ConvTranspose", 400 * MB, 60),
        ("Attention", 400 * MB, 1200 / (6 + 10)),
        ("Erf", 9 * MB, 10),
        ("Transpose", 9 * MB, (6 + 18) / (0.6 + 0.6)),
    ],
)
def test_an_unmeasured_operator_has_the_rate_of_its_kind_its_class_or_all(kind: str, amount: int, per_ns: float):
    """Compute-bound operators have a rate of operations, others of bytes."""
    calibrated = calibration(
        (work("MatMul", 6 * MB, 600 * MB, name="m"), at_rate(600 * MB, 100)),
        (work("Conv", 6 * MB, 600 * MB, name="c"), at_rate(600 * MB, 60)),
        (work("Erf", 6 * MB, 6 * MB, name="e"), at_rate(6 * MB, 10)),
        (work("Add", 18 * MB, 6 * MB, name="a"), at_rate(18 * MB, 30)),
    )
    flops = amount if amount > 100 * MB else 0
    assert calibrated.duration_ns(work(kind, 9 * MB, flops)) == pytest.approx(at_rate(amount, per_ns), rel=1e-3)


def test_a_memory_bound_product_neither_gives_nor_has_a_rate_of_operations():
    """One row times a matrix is bound by reading the matrix; a batch of rows by computing."""
    row = work("Gemm", 8 * MB, 4 * MB, name="fc")
    conv = work("Conv", 6 * MB, 600 * MB, name="conv")
    calibrated = calibration((row, at_rate(8 * MB, 4)), (conv, at_rate(600 * MB, 60)))
    assert calibrated.duration_ns(work("Gemm", 6 * MB, 600 * MB)) == at_rate(600 * MB, 60)
    assert calibrated.duration_ns(work("Gemm", 2 * MB, MB)) == at_rate(2 * MB, 4)


def test_a_small_operator_gives_no_rate():
    """Its duration is launch overhead, which does not scale with size."""
    add = (work("Add", 6 * MB, name="a"), at_rate(6 * MB, 20))
    tiny = work("Div", 12, 1, name="d")
    calibrated = calibration(add, (tiny, LAUNCH_NS + 1_000))
    assert calibrated.duration_ns(work("Div", 6 * MB, MB)) == at_rate(6 * MB, 20)
    assert calibrated.duration_ns(work("Div", 6 * MB, MB, name="d")) == at_rate(6 * MB, 20)
    assert calibrated.duration_ns(tiny) == LAUNCH_NS + 1_000


def test_views_and_operators_without_any_rate_have_no_duration():
    empty = Calibration("net", "CPUExecutionProvider", "cpu", None, "1.31", 5, ())
    assert empty.duration_ns(work("Add", 6 * MB)) == 0
    add = (work("Add", 6 * MB, name="a"), at_rate(6 * MB, 20))
    assert calibration(add).duration_ns(work("Reshape", 0)) == 0
    assert calibration(add).duration_ns(work("Conv", MB, 100 * MB)) == at_rate(MB, 20)
