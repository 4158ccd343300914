import onnx

from onnxgc.emission.dimension_names import dimension_names
from onnxgc.model.core.ir import Node, TensorType

MATRIX, LARGE, SCALAR = (TensorType(onnx.TensorProto.FLOAT, shape) for shape in ((4, 4), (64, 64), ()))


def names(nodes: list[Node], peak_bytes: int, **types: TensorType) -> dict[str, str]:
    tensors = {name for node in nodes for name in (*node.inputs, *node.outputs)}
    return dimension_names(
        nodes,
        {name: types.get(name, MATRIX) for name in tensors},
        outputs={"y"},
        numbered={"shape"},
        peak_bytes=peak_bytes,
    )


def chain(*operators: str, last: str = "y") -> list[Node]:
    """x -> t0 -> t1 -> ..."""
    tensors = ["x", *(f"t{index}" for index in range(len(operators) - 1)), last]
    return [Node(op, (tensors[i],), (tensors[i + 1],)) for i, op in enumerate(operators)]


def test_a_tensor_takes_the_name_of_one_that_died_earlier():
    found = names(chain("Neg", "Exp", "Neg", "Exp", "Neg"), 1000)
    assert found == {"t0": "d0", "t1": "d1", "t2": "d0", "t3": "d1"}


def test_a_buffer_is_not_kept_beyond_the_peak():
    """t0 and t3 have equal dimensions; two large tensors are live between their lifetimes."""
    nodes = chain("Neg", "Exp", "Neg", "Exp", "Neg")
    gap, matrix = 2 * LARGE.size_bytes, MATRIX.size_bytes
    types = {"t1": LARGE, "t2": LARGE}
    assert names(nodes, gap + matrix, **types)["t3"] == "d0"
    assert names(nodes, gap + matrix - 1, **types)["t3"] not in ("d0", "d1", "d2")


def test_a_kept_buffer_counts_for_the_next_one():
    """Two pairs of tensors with the same gap, and memory for one of them."""
    other = TensorType(onnx.TensorProto.FLOAT, (2, 8))
    nodes = [
        Node("Neg", ("x",), ("a",)),
        Node("Neg", ("x",), ("b",)),
        Node("Add", ("a", "b"), ("large",)),
        Node("Exp", ("large",), ("larger",)),
        Node("Neg", ("larger",), ("a2",)),
        Node("Neg", ("x",), ("b2",)),
        Node("Add", ("a2", "b2"), ("y",)),
    ]
    types = {"b": other, "b2": other, "large": LARGE, "larger": LARGE}
    room = 2 * LARGE.size_bytes + MATRIX.size_bytes
    found = names(nodes, room, **types)
    assert found["a2"] == found["a"]
    assert found["b2"] != found["b"]
    assert names(nodes, room + other.size_bytes, **types)["b2"] == found["b"]


def test_in_place_operators_keep_the_name_of_their_input():
    found = names(chain("Neg", "Relu", "Sigmoid", "Neg"), 1000)
    assert found == {"t0": "d0", "t1": "d0", "t2": "d0"}


def test_a_view_extends_the_lifetime_of_its_source():
    nodes = [
        Node("Neg", ("x",), ("a",)),
        Node("Reshape", ("a", "shape"), ("view",)),
        Node("Exp", ("x",), ("b",)),
        Node("Add", ("view", "b"), ("c",)),
        Node("Exp", ("c",), ("d",)),
        Node("Neg", ("d",), ("y",)),
    ]
    found = names(nodes, 1000)
    assert len({found[name] for name in ("a", "view", "b", "c")}) == 4
    assert found["d"] in (found["a"], found["b"])


def test_outputs_scalars_and_numbered_tensors_have_no_name():
    nodes = [
        Node("Shape", ("x",), ("shape",)),
        Node("ReduceSum", ("x",), ("sum",)),
        Node("Expand", ("sum", "shape"), ("y",)),
    ]
    assert names(nodes, 1000, sum=SCALAR) == {}
