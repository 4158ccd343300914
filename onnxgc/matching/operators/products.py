"""Matrix products and convolutions."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from onnxgc.matching.normal_form.affine import layer, linear, scaled, with_weight
from onnxgc.matching.normal_form.builder import Builder, Ref, of_view
from onnxgc.matching.normal_form.dimensions import Atom, Dim, coinciding, extent, merged, reshaped
from onnxgc.matching.normal_form.entities import View, WeightTensor
from onnxgc.matching.normal_form.recognized_forms import Padded
from onnxgc.matching.normal_form.terms import OfValue, in_terms, set_in_terms, unordered
from onnxgc.matching.operators.elementwise import add_scaled
from onnxgc.model.core.ir import Node
from onnxgc.model.operators.facts import has_input


def matmul(builder: Builder, node: Node) -> View | None:
    first, second = builder.refs(node)
    return _matrix_product(builder, first, second)


def gemm(builder: Builder, node: Node) -> View | None:
    first, second = (
        _transposed(ref) if node.attribute(setting, 0) else ref
        for ref, setting in zip(builder.refs(node), ("transA", "transB"), strict=False)
    )
    product = _matrix_product(builder, first, second)
    if product is None:
        return None
    product = scaled(builder.structure, product, float(node.attribute("alpha", 1.0)))
    if not has_input(node, 2):
        return product
    bias = builder.ref(node.inputs[2])
    return add_scaled(builder, [(product, 1.0), (bias, float(node.attribute("beta", 1.0)))])


def _transposed(ref: Ref | None) -> Ref | None:
    match ref:
        case View(dims=(*batch, rows, columns)):
            return replace(ref, dims=(*batch, columns, rows))
        case WeightTensor(shape=(rows, columns)):
            return replace(ref, shape=(columns, rows), is_transposed=not ref.is_transposed)
    return None


def _matrix_product(builder: Builder, first: Ref | None, second: Ref | None) -> View | None:
    match first, second:
        case View(), View():
            return product_of_views(builder, first, second)
        case View(dims=(*rest, over)), WeightTensor(name, (_, size)):
            axis = int(second.is_transposed)
            value, new = linear(builder.structure, first, over, size, name, (axis,))
            return View(value, (*rest, new))
        case WeightTensor(name, (size, _)), View(dims=(*rest, over, columns)):
            axis = int(not first.is_transposed)
            value, new = linear(builder.structure, second, over, size, name, (axis,))
            return View(value, (*rest, new, columns))
    return None


def product_of_views(builder: Builder, first: View, second: View) -> View | None:
    """A matrix product with batch dimensions; None if the dimensions do not fit."""
    if len(first.dims) < 2 or len(second.dims) < 2:
        return None
    aligned, crossing = builder.structure.separated([(OfValue(v.value), v.dims[:-2]) for v in (first, second)])
    batch = builder.structure.broadcast(*aligned)
    pairs = coinciding(first.dims[-1], second.dims[-2])
    if batch is None or pairs is None:
        return None
    rows = _own(builder, first, first.dims[-2], 0)
    columns = _own(builder, second, second.dims[-1], int(first.value == second.value))
    # The term records the pairs: several dimensions of one operand may be paired in more than one way.
    summed = (
        unordered((OfValue(first.value), in_terms((p,))), (OfValue(second.value), in_terms((q,))))
        for p, q in _joined_runs(pairs)
    )
    batches = zip(reversed(first.dims[:-2]), reversed(second.dims[:-2]), strict=False)
    shared = tuple(p for dims in batches for p, q in coinciding(*dims) or () if p == q)
    both = unordered(OfValue(first.value), OfValue(second.value))
    value = builder.structure.value("matmul", both, unordered(*summed), batch[1], set_in_terms(shared), *crossing)
    return View(value, (*batch[0], rows, columns), first.scale * second.scale)


def _joined_runs(pairs: Sequence[tuple[Atom, ...]]) -> list[tuple[Atom, ...]]:
    """The pairs in a canonical order, with consecutive runs joined."""
    runs: list[tuple[Atom, ...]] = []
    for pair in sorted(pairs, key=lambda pair: (pair[0].axis, -pair[0].stride)):
        both = [merged((end, start)) for end, start in zip(runs[-1], pair, strict=True)] if runs else []
        if both and all(len(run) == 1 for run in both):
            runs[-1] = tuple(run[0] for run in both)
        else:
            runs.append(pair)
    return runs


def _own(builder: Builder, view: View, dim: Dim, number: int) -> Dim:
    """A dimension of a product from one operand, distinct from the same dimension of the other operand."""
    return tuple(
        atom
        for part in dim
        for atom in builder.structure.axis("own", part.size, OfValue(view.value), in_terms((part,)), number)
    )


@of_view
def conv(builder: Builder, node: Node, x: View) -> View | None:
    weight = builder.weight(node, 1)
    if weight is None or builder.view(node, 2) is not None:
        return None
    kernel = weight.shape[2:]
    group = int(node.attribute("group", 1))
    # Pads of a ConvTranspose crop its result.
    x, windows = sliding_windows(builder, node, x, kernel, (0.0,) if node.op == "Conv" else ())
    channels = x.dims[1]
    out = builder.shape(node.outputs[0])
    size = weight.shape[1] * group if node.op == "ConvTranspose" else weight.shape[0]
    separate = _separate_windows(windows) if node.op == "Conv" and group == 1 else None
    if separate is not None:
        over = merged((*channels, *(atom for inner, _ in separate for atom in inner)))
        value, new = linear(builder.structure, x, over, size, weight.name)
        return _with_bias(builder, node, View(value, (x.dims[0], new, *(outer for _, outer in separate))))
    operands = (
        OfValue(x.value),
        # Groups depend on the order of the channels.
        set_in_terms(channels) if group == 1 else in_terms(channels),
        unordered(*((in_terms(dim), numbers) for dim, numbers in windows)),
        group,
        any(node.attribute("output_padding") or ()) and tuple(node.attribute("output_padding")),
    )
    spatial = spatial_dims(builder, node, x, windows, out)
    key = (weight.name, x.scale, in_terms(channels))
    value, new = layer(builder.structure, node.op, key, size, *operands, is_dense=group == 1)
    return _with_bias(builder, node, View(value, (x.dims[0], new, *spatial)))


Windows = Sequence[tuple[Dim, tuple[int, ...]]]
"""Spatial dimensions, each with kernel, stride, dilation, and pads before and after."""


def _separate_windows(windows: Windows) -> list[tuple[Dim, Dim]] | None:
    """The dimensions inside and across windows that neither overlap nor omit elements; None for others.

    A convolution with such windows is a matrix times each window: pointwise, of patches, or global.
    """
    split: list[tuple[Dim, Dim]] = []
    for dim, (kernel, stride, dilation, *pads) in windows:
        size = extent(dim)
        is_separate = kernel == size or (kernel == stride and size % kernel == 0)
        cut = reshaped((dim,), (size // kernel, kernel)) if is_separate else None
        if cut is None or any(pads) or (dilation != 1 and kernel != 1):
            return None
        split.append((cut[1], cut[0]))
    return split


def sliding_windows(
    builder: Builder, node: Node, x: View, kernel: Sequence[int], fills: Sequence[float]
) -> tuple[View, Windows]:
    """The windows of a node and their operand; a preceding Pad with one of the `fills` is absorbed."""
    rank = len(kernel)
    strides = node.attribute("strides") or [1] * rank
    dilations = node.attribute("dilations") or [1] * rank
    begins, ends = pads(builder, node, kernel, strides, dilations)
    origins: Mapping[Dim, tuple[Dim, int, int]] = {}
    match builder.structure.facts.get(x.value):
        case Padded(value, padded, fill) if fill in fills and all(dim in x.dims[2:] for dim in padded):
            origins, x = padded, replace(x, value=value)
    dims, windows = list(x.dims), []
    for axis in range(rank):
        dim, before, after = origins.get(x.dims[2 + axis], (x.dims[2 + axis], 0, 0))
        dims[2 + axis] = dim
        numbers = (kernel[axis], strides[axis], dilations[axis], begins[axis] + before, ends[axis] + after)
        windows.append((dim, tuple(int(number) for number in numbers)))
    return replace(x, dims=tuple(dims)), windows


def pads(
    builder: Builder, node: Node, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> tuple[list[int], list[int]]:
    rank = len(kernel)
    auto = node.attribute("auto_pad", "NOTSET")
    if auto not in ("SAME_UPPER", "SAME_LOWER"):
        pads = list(node.attribute("pads") or [0] * (2 * rank))
        return pads[:rank], pads[rank:]
    source, result = builder.shape(node.inputs[0])[2:], builder.shape(node.outputs[0])[2:]
    if node.op == "ConvTranspose":
        source, result = result, source
    spans = [(size - 1) * dilation + 1 for size, dilation in zip(kernel, dilations, strict=True)]
    totals = [
        max((out - 1) * stride + span - size, 0)
        for out, stride, span, size in zip(result, strides, spans, source, strict=True)
    ]
    begins = [(total + (auto == "SAME_LOWER")) // 2 for total in totals]
    return begins, [total - begin for total, begin in zip(totals, begins, strict=True)]


def spatial_dims(builder: Builder, node: Node, x: View, windows: Windows, out: tuple[int, ...]) -> list[Dim]:
    """The spatial dimensions of a result: those of the operand where each element has one window."""
    result: list[Dim] = []
    is_transposed = node.op == "ConvTranspose"
    for (dim, numbers), size in zip(windows, out[2:], strict=True):
        if numbers[1] == 1 and extent(dim) == size:
            result.append(dim)
        else:
            result.append(builder.structure.axis("windows", size, is_transposed, in_terms(dim), numbers))
    return result


def _with_bias(builder: Builder, node: Node, x: View) -> View:
    bias = builder.weight(node, 2)
    if bias is None or bias.number == 0:
        return x
    spatial = replace(bias, shape=(*bias.shape, *(1,) * (len(x.dims) - 2)))
    return with_weight(builder.structure, x, spatial, is_added=True)
