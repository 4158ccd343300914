"""Hostile, odd and huge model files by kind, and random changes of a small network."""

import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import onnx
from google.protobuf.message import EncodeError, Message  # type: ignore[import-untyped]
from onnx import TensorProto, helper, parser

_HEAD = '<ir_version: 8, opset_import: ["": {opset}, "com.microsoft": 1, "l": 1]>'
_GRAPH = (
    "g (float[2,3] x) => (float[2,4] y) <float[3,4] w = {{1,2,3,4,5,6,7,8,9,10,11,12}}> {{ h = MatMul(x, w) {body} }}"
)
_SUM = "m = ReduceMean<keepdims=0>(c) y = Add(h, m)"
_CAST = "f = Cast<to=1>(c) m = ReduceMean<keepdims=0>(f) y = Add(h, m)"

# fmt: off
_LOOP = "body=b (int64 i, bool p, float[2,4] s) => (bool q, float[2,4] o) { q = Identity(p) o = Add(s, s) }"
BODIES = {
    "fill_negative": f"s = Constant<value_ints=[-5]>() c = ConstantOfShape(s) {_SUM}",
    "fill_2_40": f"s = Constant<value_ints=[1099511627776]>() c = ConstantOfShape(s) {_SUM}",
    "fill_overflow": f"s = Constant<value_ints=[4611686018427387904, 8]>() c = ConstantOfShape(s) {_SUM}",
    "fill_rank_5000": f"s = Constant<value_ints=[{', '.join(['1'] * 5000)}]>() c = ConstantOfShape(s) {_SUM}",
    "fill_2d_shape": f"s = Constant<value=int64[1,2] {{2, 3}}>() c = ConstantOfShape(s) {_SUM}",
    "fill_text": f"s = Constant<value_ints=[2]>() c = ConstantOfShape<value=string[1] {{\"a\"}}>(s) {_SUM}",
    "range_10_9": "a = Constant<value_int=0>() b = Constant<value_int=1000000000>() d = Constant<value_int=1>()"
    f" c = Range(a, b, d) {_CAST}",
    "range_nan": "a = Constant<value_float=0.0>() b = Constant<value=float {nan}>() d = Constant<value_float=1.0>()"
    f" c = Range(a, b, d) {_SUM}",
    "range_inf": "a = Constant<value_float=0.0>() b = Constant<value=float {inf}>() d = Constant<value_float=1.0>()"
    f" c = Range(a, b, d) {_SUM}",
    "range_step_0": "a = Constant<value_int=0>() b = Constant<value_int=10>() d = Constant<value_int=0>()"
    f" c = Range(a, b, d) {_CAST}",
    "expand_2_40": "s = Constant<value_ints=[1048576, 1048576]>() o = Constant<value_floats=[1.0]>()"
    f" c = Expand(o, s) {_SUM}",
    "expand_input": f"s = Constant<value_ints=[1048576, 1048576, 2, 4]>() c = Expand(h, s) {_SUM}",
    "tile_2_40": "s = Constant<value_ints=[1099511627776]>() o = Constant<value_floats=[1.0]>()"
    f" c = Tile(o, s) {_SUM}",
    "pad_2_40": "s = Constant<value_ints=[0, 1099511627776]>() o = Constant<value_floats=[1.0]>()"
    f" c = Pad(o, s) {_SUM}",
    "pad_evil": f"s = Constant<value_ints=[1, 1, 1, 1]>() c = Pad<mode=\"evil\">(h, s) {_SUM}",
    "groups_0": "r = Constant<value_ints=[1, 4, 2, 1]>() q = Reshape(h, r)"
    f" s = Constant<value_floats=[1.0,1.0,1.0,1.0]>() c = GroupNormalization<num_groups=0>(q, s, s) {_SUM}",
    "cast_0": "c = Cast<to=0>(h) y = Cast<to=1>(c)",
    "cast_999": "c = Cast<to=999>(h) y = Cast<to=1>(c)",
    "split_2_40": "c, y = Split<axis=0, num_outputs=1099511627776>(h)",
    "split_0": "c, y = Split<axis=0, num_outputs=0>(h)",
    "concat_doubled": "c0 = Concat<axis=0>(w, w) "
    + " ".join(f"c{n + 1} = Concat<axis=0>(c{n}, c{n})" for n in range(30))
    + " m = ReduceMean<keepdims=0>(c30) y = Add(h, m)",
    "add_chain": "c0 = Add(w, w) "
    + " ".join(f"c{n + 1} = Add(c{n}, w)" for n in range(3000))
    + " m = ReduceMean<keepdims=0>(c3000) y = Add(h, m)",
    "regex": "t = Constant<value_strings=[\"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!\"]>()"
    f" c = RegexFullMatch<pattern=\"(a+)+$\">(t) {_CAST}",
    "loop_10_9": "n = Constant<value_int=1000000000>() t = Constant<value=bool {1}>()"
    " y = Loop<" + _LOOP + ">(n, t, h)",
    "loop_endless": "t = Constant<value=bool {1}>()"
    " y = Loop<" + _LOOP + ">(, t, h)",
    "loop_empty_body": "n = Constant<value_int=1000000000> () t = Constant<value=bool {1}>()"
    " y = Loop<body=b (int64 i, bool p, float[2,4] s) => (bool p, float[2,4] s) { }>(n, t, h)",
    "scan_0_inputs": "y = Scan<num_scan_inputs=0, body=b (float[2,4] s) => (float[2,4] o) { o = Add(s, s) }>(h)",
    "scan_10_6": "k = Constant<value_ints=[1000000, 4]>() o = ConstantOfShape(k)"
    " y, z = Scan<num_scan_inputs=1, body=b (float[2,4] s, float[4] r) => (float[2,4] v, float[4] u)"
    " { v = Add(s, r) u = Identity(r) }>(h, o)",
    "scan_axis": "z, y = Scan<num_scan_inputs=1, scan_input_axes=[99], body=b (float[4] s, float[4] r) => (float[4] v,"
    " float[4] u) { v = Add(s, r) u = Identity(r) }>(h, h)",
    "if_no_branch": "t = Constant<value=bool {1}>() y = If<then_branch=b () => (float[2,4] o) { o = Add(h, h) }>(t)",
    "optional": "c = Optional(h) y = OptionalGetElement(c)",
    "average_pool_2_31": "r = Constant<value_ints=[1, 1, 2, 4]>() q = Reshape(h, r)"
    f" c = AveragePool<kernel_shape=[2147483648, 2147483648]>(q) {_SUM}",
    "max_pool_pads": "r = Constant<value_ints=[1, 1, 2, 4]>() q = Reshape(h, r)"
    f" c = MaxPool<kernel_shape=[2, 2], pads=[-5, -5, 99999999999, 0]>(q) {_SUM}",
    "pool_stride_0": "r = Constant<value_ints=[1, 1, 2, 4]>() q = Reshape(h, r)"
    f" c = MaxPool<kernel_shape=[2, 2], strides=[0, 0]>(q) {_SUM}",
    "conv_group_0": "r = Constant<value_ints=[1, 1, 2, 4]>() q = Reshape(h, r) k = Constant<value=float[1,1,1,1] {1}>()"
    f" c = Conv<group=0>(q, k) {_SUM}",
    "resize_2_40": "r = Constant<value_ints=[1, 1, 2, 4]>() q = Reshape(h, r)"
    f" s = Constant<value_ints=[1, 1, 1099511627776, 4]>() c = Resize(q, , , s) {_SUM}",
    "conv_transpose_0": "r = Constant<value_ints=[1, 1, 2, 4]>() q = Reshape(h, r)"
    f" k = Constant<value=float[1,1,1,1] {{1}}>() c = ConvTranspose<output_shape=[0, 0]>(q, k) {_SUM}",
    "affine_grid": "k = Constant<value=float[1,2,3] {1,0,0,0,1,0}>()"
    f" s = Constant<value_ints=[1, 1, 1048576, 1048576]>() c = AffineGrid(k, s) {_SUM}",
    "axis_2_40": f"c = Softmax<axis=1099511627776>(h) {_SUM}",
    "perm": "c = Transpose<perm=[5, -9]>(h) y = Add(h, c)",
    "perm_repeated": "c = Transpose<perm=[0, 0]>(h) y = Add(h, h)",
    "reshape_two_unknown": f"r = Constant<value_ints=[-1, -1]>() c = Reshape(h, r) {_SUM}",
    "reshape_2_62": f"r = Constant<value_ints=[4611686018427387904, 4611686018427387904]>() c = Reshape(h, r) {_SUM}",
    "gather_range": f"i = Constant<value_ints=[1000000, -1000000]>() c = Gather(h, i) {_SUM}",
    "one_hot_2_40": "d = Constant<value_int=1099511627776>() i = Constant<value_ints=[1, 2]>() v ="
    f" Constant<value_floats=[0.0, 1.0]>() c = OneHot(i, d, v) {_SUM}",
    "einsum": f"c = Einsum<equation=\"...->,->ij,,\">(h, h) {_SUM}",
    "empty_learned": "e = Constant<value=float[0] {}>() r = ReduceSum(e) y = Add(h, r)",
    "window_2_40": f"n = Constant<value_int=1099511627776>() c = HannWindow(n) {_SUM}",
    "eye_2_20": f"s = Constant<value_ints=[1048576, 1048576]>() o = ConstantOfShape(s) c = EyeLike(o) {_SUM}",
    "lstm_hidden": "r = Constant<value_ints=[2, 1, 4]>() q = Reshape(h, r) k = Constant<value=float[1,4,4]"
    f" {{1,2,3,4,1,2,3,4,1,2,3,4,1,2,3,4}}>() c, d, e = LSTM<hidden_size=1099511627776>(q, k, k) {_SUM}",
    "unknown_operator": "y = Evil(h)",
    "unknown_domain": "y = evil.domain.Evil(h)",
    "own_output": "y = Add(y, h)",
    "cycle": "a = Add(b, h) b = Add(a, h) y = Add(a, b)",
    "twice": "y = Add(h, h) y = Add(h, h)",
    "no_source": "y = Add(h, nowhere)",
    "stft": "r = Constant<value_ints=[1, 8, 1]>() q = Reshape(h, r) p = Constant<value_int=0>()"
    f" c = STFT(q, p) {_SUM}",
    "lower_bound": "y = Clip(h, h, h)",
    "depth_to_space": "r = Constant<value_ints=[1, 4, 2, 1]>() q = Reshape(h, r)"
    f" c = DepthToSpace<blocksize=0>(q) {_SUM}",
    "random_shape": f"c = RandomNormal<shape=[1048576, 1048576, 1048576, 1048576]>() {_SUM}",
    "identities": "i0 = Identity(h) "
    + " ".join(f"i{n + 1} = Identity(i{n})" for n in range(250_000))
    + " y = Add(h, i250000)",
    "reversed": "y = Add(h, r0) " + " ".join(f"r{n} = Relu(r{n + 1})" for n in range(3000)) + " r3000 = Relu(h)",
    "many_readers": " ".join(f"r{n} = Relu(h)" for n in range(1000))
    + " y = Sum("
    + ", ".join(f"r{n}" for n in range(1000))
    + ")",
}
# fmt: on
"""Nodes after `h = MatMul(x, w)` that give `y`, by what is wrong with them."""


def network(body: str = "y = Relu(h)", opset: int = 18) -> onnx.ModelProto:
    model: onnx.ModelProto = parser.parse_model(_HEAD.format(opset=opset) + _GRAPH.format(body=body))
    del model.opset_import[2:]
    return model


def _network_bytes(body: str) -> bytes:
    return bytes(network(body).SerializeToString())


_PLACES = ("x", "w", "h", "y", "g", "node", "op", "domain", "doc", "dimension", "key", "value", "producer")
_NAMES = {
    "escape": b"a\x1b[31mb", "bell": b"a\x07b", "nul": b"a\x00b", "backspace": b"a\x08b", "c1": b"a\xc2\x9bb",
    "right_to_left": "a\u202eb".encode(), "line_separator": "a\u2028b".encode(),
    "newline": b"a\nb", "carriage": b"a\rb",
    "invalid": b"a\xff\xfeb", "surrogate": b"a\xed\xa0\x80b", "markup": b"[bold]a[/x]", "long": b"x" * 100_000,
    "html": b"<script>alert(1)</script>", "format": b"{0.__class__}%s%n", "empty": b"",
}  # fmt: skip
_INTEGERS = (0, -1, 1, 99, 999, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63))


def named(place: str, name: bytes) -> bytes:
    """The network with a name, of any bytes, at a place."""
    model, mark = network("n = Relu(h) y = Add(n, h)"), "MARK" + "x" * max(len(name) - 4, 0)
    graph = model.graph
    node = graph.node[1]
    setters: dict[str, Callable[[], None]] = {
        "node": lambda: setattr(node, "name", mark),
        "op": lambda: setattr(node, "op_type", mark),
        "domain": lambda: setattr(node, "domain", mark),
        "doc": lambda: setattr(node, "doc_string", mark),
        "g": lambda: setattr(graph, "name", mark),
        "producer": lambda: setattr(model, "producer_name", mark),
        "dimension": lambda: setattr(graph.input[0].type.tensor_type.shape.dim[0], "dim_param", mark),
        "key": lambda: model.metadata_props.add(key=mark, value="v") and None,
        "value": lambda: model.metadata_props.add(key="pkg", value=mark) and None,
    }
    if place in setters:
        setters[place]()
    else:
        for value in (*graph.input, *graph.initializer, *graph.output):
            value.name = mark if value.name == place else value.name
        for proto in graph.node:
            proto.input[:] = [mark if item == place else item for item in proto.input]
            proto.output[:] = [mark if item == place else item for item in proto.output]
    padded = name.ljust(len(mark), b"_")
    return bytes(model.SerializeToString().replace(mark.encode(), padded))


def external(folder: Path, **entries: str) -> onnx.ModelProto:
    """The network with its weight in `w.bin`, a file of 48 bytes."""
    (folder / "w.bin").write_bytes(bytes(48))
    model = network()
    tensor = model.graph.initializer[0]
    tensor.ClearField("float_data")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in ({"location": "w.bin"} | entries).items():
        tensor.external_data.add(key=key, value=value)
    return model


EXTERNAL = {
    "passwd": {"location": "/etc/passwd"}, "parent": {"location": "../w.bin"}, "zero": {"location": "/dev/zero"},
    "link": {"location": "link.bin"}, "fifo": {"location": "fifo"}, "folder": {"location": "."},
    "none": {"location": ""},
    "long": {"location": "x" * 5000}, "control": {"location": "a\x1b[31m\u202e"},
    "missing": {"location": "nowhere.bin"},
    "offset_negative": {"offset": "-24"}, "offset_2_63": {"offset": str(2**63 - 1)},
    "offset_2_70": {"offset": str(2**70)},
    "offset_text": {"offset": "evil"}, "offset_behind": {"offset": "40"}, "length_short": {"length": "4"},
    "length_long": {"length": "4800"}, "length_negative": {"length": "-1"}, "length_text": {"length": "9" * 5000},
    "sparse": {"location": "sparse.bin"}, "nul": {"location": "a\x00b"},
}  # fmt: skip


def _external_file(folder: Path, entries: dict[str, str]) -> bytes:
    link, fifo = folder / "link.bin", folder / "fifo"
    if not link.is_symlink():
        link.symlink_to("/etc/passwd")
        os.mkfifo(fifo)
        with open(folder / "sparse.bin", "wb") as stream:
            stream.truncate(100 << 30)
    return bytes(external(folder, **entries).SerializeToString())


def changed(field: str, value: int) -> bytes:
    """The network with one number changed."""
    model = network()
    graph = model.graph
    tensor, kind = graph.initializer[0], graph.input[0].type.tensor_type
    narrow = max(min(value, 2**31 - 1), -(2**31))
    {
        "weight_type": lambda: setattr(tensor, "data_type", narrow),
        "weight_dim": lambda: tensor.dims.__setitem__(0, value),
        "weight_rank": lambda: tensor.dims.extend([value] * 3),
        "input_type": lambda: setattr(kind, "elem_type", narrow),
        "input_dim": lambda: setattr(kind.shape.dim[0], "dim_value", value),
        "input_dims": lambda: kind.CopyFrom(helper.make_tensor_type_proto(1, [value, value]).tensor_type),
        "opset": lambda: setattr(model.opset_import[0], "version", value),
        "ir": lambda: setattr(model, "ir_version", value),
        "attribute_type": lambda: graph.node[1].attribute.add(name="alpha", type=narrow % 15),
        "segment": lambda: setattr(tensor.segment, "begin", value),
    }[field]()  # type: ignore[no-untyped-call]
    return bytes(model.SerializeToString())


_FIELDS = ("weight_type", "weight_dim", "weight_rank", "input_type", "input_dim", "input_dims", "opset", "ir",
           "attribute_type", "segment")  # fmt: skip


def doubling(times: int, *, is_recursive: bool = False) -> bytes:
    """Functions each of which calls the next twice; the last calls itself if recursive."""
    model = network("y = Relu(h)")
    model.opset_import.append(helper.make_opsetid("l", 1))
    model.graph.node[1].op_type, model.graph.node[1].domain = "F0", "l"
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("l", 1)]
    for index in range(times):
        last = index == times - 1 and not is_recursive
        op, domain = ("Relu", "") if last else (f"F{(index + 1) % times}", "l")
        nodes = [helper.make_node(op, [a], [b], domain=domain) for a, b in (("a", "b"), ("b", "c"))]
        model.functions.append(helper.make_function("l", f"F{index}", ["a"], ["c"], nodes, opsets))
    return bytes(model.SerializeToString())


def nested_text(depth: int) -> bytes:
    branch = "c = Add(h, h)"
    for _ in range(depth):
        branch = (
            f"c = If<then_branch=a () => (float[2,4] c) {{ {branch} }}, else_branch=e () => (float[2,4] h) {{}}>(t)"
        )
    body = "t = Constant<value=bool {1}>() " + branch + " y = Add(c, c)"
    return (_HEAD.format(opset=18) + _GRAPH.format(body=body)).encode()


def other_files() -> Iterator[tuple[str, Callable[[], bytes]]]:
    plain = network().SerializeToString
    yield "empty.onnx", bytes
    yield "text.onnx", lambda: b"not a model\x1b[31m"
    yield "pickle.onnx", lambda: b"cos\nsystem\n(S'touch evil'\ntR."
    yield "truncated.onnx", lambda: plain()[:-20]
    yield "doubled.onnx", lambda: plain() * 2
    yield "deep.onnx", lambda: b"\x3a" + b"\x0a\x7f" * 5000
    yield "sparse_weight.onnx", _sparse_weight
    yield "reference.onnx", _reference
    yield "function_constant.onnx", _function_constant
    for times in (8, 20, 40):
        yield f"doubling_{times}.onnx", partial(doubling, times)
    yield "recursive.onnx", partial(doubling, 2, is_recursive=True)
    for depth in (50, 20_000):
        yield f"nested_{depth}.onnxtxt", partial(nested_text, depth)
    yield "deep.json", lambda: b'{"graph":' * 20_000
    yield "number.json", lambda: b'{"irVersion": "' + b"9" * 5000 + b'"}'


def _sparse_weight() -> bytes:
    model = network()
    sparse = model.graph.sparse_initializer.add()
    sparse.values.CopyFrom(helper.make_tensor("s", 1, [1], [1.0]))
    sparse.indices.CopyFrom(helper.make_tensor("i", 7, [1], [2**40]))
    sparse.dims.extend([2**40, 2**40])
    return bytes(model.SerializeToString())


def _reference() -> bytes:
    model = network("y = LeakyRelu(h)")
    model.graph.node[1].attribute.add(name="alpha", ref_attr_name="evil", type=onnx.AttributeProto.FLOAT)
    return bytes(model.SerializeToString())


def _function_constant() -> bytes:
    model = onnx.ModelProto.FromString(doubling(1))
    model.functions[0].node.insert(0, onnx.NodeProto(op_type="Constant"))
    return bytes(model.SerializeToString())


def cases(folder: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Names and makers of all files of fixed kinds."""
    for name, body in BODIES.items():
        yield f"{name}.onnx", partial(_network_bytes, body)
    yield from other_files()
    for name, entries in EXTERNAL.items():
        yield f"external_{name}.onnx", partial(_external_file, folder, entries)
    for field in _FIELDS:
        for value in _INTEGERS:
            yield f"{field}_{value}.onnx", partial(changed, field, value)
    for place in _PLACES:
        for kind, text in _NAMES.items():
            yield f"{place}_{kind}.onnx", partial(named, place, text)


def mutated(rng: random.Random) -> bytes:
    """A network with one to three random changes of its fields or of its bytes."""
    body = rng.choice([text for text in BODIES.values() if len(text) < 400])
    model = network(body)
    for _ in range(rng.randint(1, 3)):
        _change_field(model, rng)
    try:
        content = bytearray(model.SerializeToString())
    except (EncodeError, ValueError):
        return b""
    if rng.random() < 0.3:
        for _ in range(rng.randint(1, 4)):
            content[rng.randrange(len(content))] = rng.randrange(256)
    return bytes(content)


def _change_field(message: Message, rng: random.Random) -> None:
    fields = message.ListFields()
    if not fields:
        return
    field, value = rng.choice(fields)
    is_list = hasattr(value, "append")
    item = rng.choice(list(value)) if is_list and len(value) else value
    if isinstance(item, Message):
        if rng.random() < 0.9:
            _change_field(item, rng)
            return
        message.ClearField(field.name)
        return
    text = rng.choice(["", "x", "h", "y", "evil\x1b", "x" * 2000])
    number = rng.choice([float("nan"), float("inf"), -1e30, 0.0])
    drawn: object = rng.choice(_INTEGERS) if isinstance(item, int) else number if isinstance(item, float) else text
    drawn = text.encode() if isinstance(item, bytes) else drawn
    try:
        if is_list and len(value):
            value[rng.randrange(len(value))] = drawn
        else:
            setattr(message, field.name, drawn)
    except (ValueError, TypeError):
        message.ClearField(field.name)
