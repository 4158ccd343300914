"""Casts between element types that lose no value."""

from collections.abc import Mapping

from onnx import TensorProto

# Bits without the sign, and whether there is a sign.
_INTEGERS: Mapping[int, tuple[int, bool]] = {
    TensorProto.BOOL: (1, False),
    TensorProto.UINT8: (8, False),
    TensorProto.UINT16: (16, False),
    TensorProto.UINT32: (32, False),
    TensorProto.UINT64: (64, False),
    TensorProto.INT8: (7, True),
    TensorProto.INT16: (15, True),
    TensorProto.INT32: (31, True),
    TensorProto.INT64: (63, True),
}
# Bits of the significand, and the largest exponent.
_FLOATS: Mapping[int, tuple[int, int]] = {
    TensorProto.FLOAT16: (11, 16),
    TensorProto.BFLOAT16: (8, 128),
    TensorProto.FLOAT: (24, 128),
    TensorProto.DOUBLE: (53, 1024),
}


def keeps_all_values(source: int, target: int) -> bool:
    """Whether `target` represents every number of the element type `source` exactly.

    >>> keeps_all_values(TensorProto.INT32, TensorProto.DOUBLE)
    True
    >>> keeps_all_values(TensorProto.INT32, TensorProto.FLOAT)
    False
    """
    if target == TensorProto.BOOL:
        return source == target
    if source in _INTEGERS and target in _INTEGERS:
        (bits, is_signed), (room, has_sign) = _INTEGERS[source], _INTEGERS[target]
        return bits <= room and (has_sign or not is_signed)
    if source in _INTEGERS and target in _FLOATS:
        return _INTEGERS[source][0] <= _FLOATS[target][0]
    if source in _FLOATS and target in _FLOATS:
        return all(needed <= room for needed, room in zip(_FLOATS[source], _FLOATS[target], strict=True))
    return False
