"""Products: of matrices, with weights, and of windows that slide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onnxgc.matching.normal_form.builder import Builder, Ref, Result
from onnxgc.matching.normal_form.dimensions import Atom, Dim, extent, merged, paired, reshaped
from onnxgc.matching.normal_form.structure import Fixed, OfValue, View, in_terms, set_in_terms, unordered
from onnxgc.matching.operators.elementwise import total
from onnxgc.model.core.ir import Node


def matmul(t: Builder, node: Node) -> Result:
    first, second = t.refs(node)
    return _matrix_product(t, first, second)


def gemm(t: Builder, node: Node) -> Result:
    first, second = t.refs(node)[:2]
    first = _turned(first) if node.attribute("transA", 0) else first
    second = _turned(second) if node.attribute("transB", 0) else second
    result = _matrix_product(t, first, second)
    if result is None or result[0] is None:
        return None
    product = t.terms.scaled(result[0], float(node.attribute("alpha", 1.0)))
    if len(node.inputs) < 3 or not node.inputs[2]:
        return [product]
    bias = t.ref(node.inputs[2])
    beta = float(node.attribute("beta", 1.0))
    return total(t, [(product, 1.0), (bias, beta)])


def _turned(ref: Ref | None) -> Ref | None:
    if isinstance(ref, View):
        return replace(ref, dims=(*ref.dims[:-2], ref.dims[-1], ref.dims[-2]))
    if isinstance(ref, Fixed):
        return replace(ref, shape=(*ref.shape[:-2], ref.shape[-1], ref.shape[-2]), is_turned=True)
    return None


def _matrix_product(t: Builder, first: Ref | None, second: Ref | None) -> Result:
    if isinstance(first, View) and isinstance(second, View):
        result = product_of_views(t, first, second)
        return None if result is None else [result]
    if isinstance(first, View) and isinstance(second, Fixed) and len(second.shape) == 2 and first.dims:
        axis = int(second.is_turned)
        value, new = t.terms.contracted(first, first.dims[-1], second.shape[1], second.name, (axis,))
        return [View(value, (*first.dims[:-1], new))]
    if (
        isinstance(first, Fixed)
        and isinstance(second, View)
        and len(first.shape) == 2
        and len(second.dims) > 1
    ):
        axis = int(not first.is_turned)
        value, new = t.terms.contracted(second, second.dims[-2], first.shape[0], first.name, (axis,))
        return [View(value, (*second.dims[:-2], new, second.dims[-1]))]
    return None


def product_of_views(t: Builder, first: View, second: View) -> View | None:
    """Batch dimensions lie on each other, columns of the first on rows of the second; the rest is new."""
    if len(first.dims) < 2 or len(second.dims) < 2:
        return None
    laid, crossing = t.structure.apart([(OfValue(v.value), v.dims[:-2]) for v in (first, second)])
    batch = t.structure.broadcast(*laid)
    pairs = paired(first.dims[-1], second.dims[-2])
    if batch is None or pairs is None:
        return None
    rows = _own(t, first, first.dims[-2], 0)
    columns = _own(t, second, second.dims[-1], int(first.value == second.value))
    # Several dimensions of one operand can lie on those of the other in more ways than one.
    summed = (
        unordered((OfValue(first.value), in_terms((p,))), (OfValue(second.value), in_terms((q,))))
        for p, q in _matched(pairs)
    )
    batches = zip(reversed(first.dims[:-2]), reversed(second.dims[:-2]), strict=False)
    shared = tuple(p for dims in batches for p, q in paired(*dims) or () if p == q)
    both = unordered(OfValue(first.value), OfValue(second.value))
    value = t.structure.value("matmul", both, unordered(*summed), batch[1], set_in_terms(shared), *crossing)
    return View(value, (*batch[0], rows, columns), first.scale * second.scale)


def _matched(pairs: Sequence[tuple[Atom, Atom]]) -> list[tuple[Atom, Atom]]:
    """Which runs of two dimensions lie on each other, in no order, and as long as they can be."""
    runs: list[tuple[Atom, Atom]] = []
    for pair in sorted(pairs, key=lambda pair: (pair[0].axis, -pair[0].stride)):
        both = [merged((end, start)) for end, start in zip(runs[-1], pair, strict=True)] if runs else []
        if both and all(len(run) == 1 for run in both):
            runs[-1] = (both[0][0], both[1][0])
        else:
            runs.append(pair)
    return runs


def _own(t: Builder, view: View, dim: Dim, number: int) -> Dim:
    """A dimension of a product that one operand alone brings: it may meet itself from the other."""
    return tuple(
        atom
        for part in dim
        for atom in t.structure.axis("own", part.size, OfValue(view.value), in_terms((part,)), number)
    )


def conv(t: Builder, node: Node) -> Result:
    x, weight = t.view(node), t.fixed(node, 1)
    if x is None or weight is None:
        return None
    kernel = weight.shape[2:]
    group = int(node.attribute("group", 1))
    x, places = windows(t, node, x, kernel)
    channels = x.dims[1]
    out = t.shape(node.outputs[0])
    sizes = weight.shape[1] * group if node.op == "ConvTranspose" else weight.shape[0]
    apart = _apart(places) if node.op == "Conv" and group == 1 else None
    if apart is not None:
        over = merged((*channels, *(atom for inner, _ in apart for atom in inner)))
        value, new = t.terms.contracted(x, over, sizes, weight.name)
        return _with_bias(t, node, View(value, (x.dims[0], new, *(outer for _, outer in apart))))
    what = (
        OfValue(x.value),
        # Each group makes channels of its own, in the order in which these lie.
        set_in_terms(channels) if group == 1 else in_terms(channels),
        unordered(*((in_terms(dim), numbers) for dim, numbers in places)),
        group,
        any(node.attribute("output_padding") or ()) and tuple(node.attribute("output_padding")),
    )
    spatial = slid(t, node, x, places, out)
    key = (weight.name, x.scale, in_terms(channels))
    value, new = t.terms.layer(node.op, key, sizes, *what, is_dense=group == 1)
    return _with_bias(t, node, View(value, (x.dims[0], new, *spatial)))


Places = Sequence[tuple[Dim, tuple[int, ...]]]


def _apart(places: Places) -> list[tuple[Dim, Dim]] | None:
    """What windows hold and which there are, along each dimension; None where they overlap or leave some out.

    Such a convolution is a matrix times each window: pointwise, of patches, or of all.
    """
    found: list[tuple[Dim, Dim]] = []
    for dim, (kernel, stride, dilation, *pads) in places:
        size = extent(dim)
        is_apart = kernel == size or (kernel == stride and size % kernel == 0)
        cut = reshaped((dim,), (size // kernel, kernel)) if is_apart else None
        if cut is None or any(pads) or (dilation != 1 and kernel != 1):
            return None
        found.append((cut[1], cut[0]))
    return found


def windows(
    t: Builder, node: Node, x: View, kernel: Sequence[int], fills: Sequence[float] = (0.0,)
) -> tuple[View, Places]:
    """The spatial dimensions with kernel, stride, dilation and pads; a Pad of `fills` before is taken in."""
    rank = len(kernel)
    strides = node.attribute("strides") or [1] * rank
    dilations = node.attribute("dilations") or [1] * rank
    begins, ends = pads(t, node, kernel, strides, dilations)
    known = t.structure.known_as.get(x.value, ("",))
    origin: dict[Dim, tuple[Dim, int, int]] = {}
    if known[0] == "padded" and known[3] in fills and all(dim in x.dims[2:] for dim in known[2]):
        origin, x = known[2], replace(x, value=known[1])
    dims, places = list(x.dims), []
    for axis in range(rank):
        dim, before, behind = origin.get(x.dims[2 + axis], (x.dims[2 + axis], 0, 0))
        dims[2 + axis] = dim
        numbers = (kernel[axis], strides[axis], dilations[axis], begins[axis] + before, ends[axis] + behind)
        places.append((dim, tuple(int(number) for number in numbers)))
    return replace(x, dims=tuple(dims)), places


def pads(
    t: Builder, node: Node, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> tuple[list[int], list[int]]:
    rank = len(kernel)
    auto = node.attribute("auto_pad", "NOTSET")
    if auto not in ("SAME_UPPER", "SAME_LOWER"):
        pads = list(node.attribute("pads") or [0] * (2 * rank))
        return pads[:rank], pads[rank:]
    source, result = t.shape(node.inputs[0])[2:], t.shape(node.outputs[0])[2:]
    if node.op == "ConvTranspose":
        source, result = result, source
    spans = [(size - 1) * dilation + 1 for size, dilation in zip(kernel, dilations, strict=True)]
    totals = [
        max((out - 1) * stride + span - size, 0)
        for out, stride, span, size in zip(result, strides, spans, source, strict=True)
    ]
    begins = [(total + (auto == "SAME_LOWER")) // 2 for total in totals]
    return begins, [total - begin for total, begin in zip(totals, begins, strict=True)]


def slid(t: Builder, node: Node, x: View, places: Places, out: tuple[int, ...]) -> list[Dim]:
    """Spatial dimensions behind windows: the same where every element has its own."""
    result: list[Dim] = []
    is_transposed = node.op == "ConvTranspose"
    for (dim, numbers), size in zip(places, out[2:], strict=True):
        if numbers[1] == 1 and extent(dim) == size:
            result.append(dim)
        else:
            result.append(t.structure.axis("windows", size, is_transposed, in_terms(dim), numbers))
    return result


def _with_bias(t: Builder, node: Node, x: View) -> Result:
    bias = t.fixed(node, 2)
    if bias is None or bias.number == 0:
        return [x]
    spread = replace(bias, shape=(*bias.shape, *(1,) * (len(x.dims) - 2)))
    return [t.terms.with_weight(x, spread, is_added=True)]
