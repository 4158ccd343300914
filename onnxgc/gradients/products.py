"""Gradients of matrix products."""

import math

from onnxgc.gradients.differentiate import GradientContext
from onnxgc.gradients.rule_helpers import product, reshape, unbroadcast


def gemm(g: GradientContext) -> None:
    """Y = alpha A' B' + beta C, where ' is an optional transposition.

    A: [M, K] (or [K, M]), B: [K, N] (or [N, K]), C broadcasts to [M, N].
    """
    alpha, beta = float(g.attribute("alpha", 1.0)), float(g.attribute("beta", 1.0))
    transpose_a, transpose_b = int(g.attribute("transA", 0)), int(g.attribute("transB", 0))
    if g.wants(2):
        summed = unbroadcast(g, g.dy, g.output_shape(), g.input_shape(2))
        g.give(2, summed if beta == 1.0 else g.emit("Mul", summed, g.scalar(beta)))
    if g.wants(1):
        operands = (g.dy, g.x(0), 1, transpose_a) if transpose_b else (g.x(0), g.dy, 1 - transpose_a, 0)
        g.give(1, _gemm(g, *operands, alpha))
    if g.wants(0):
        operands = (g.x(1), g.dy, transpose_b, 1) if transpose_a else (g.dy, g.x(1), 0, 1 - transpose_b)
        g.give(0, _gemm(g, *operands, alpha))


def _gemm(
    g: GradientContext, left: str, right: str, transpose_left: int, transpose_right: int, alpha: float = 1.0
) -> str:
    return g.emit("Gemm", left, right, alpha=alpha, transA=transpose_left, transB=transpose_right)


def matmul(g: GradientContext) -> None:
    """Y = A B as numpy.matmul: dA = dY B^T, dB = A^T dY, summed over broadcast batch axes.

    A vector operand counts as a matrix of one row (left) or one column (right).
    """
    shape_a, shape_b = g.input_shape(0), g.input_shape(1)
    matrix_a = (1, *shape_a) if len(shape_a) == 1 else shape_a
    matrix_b = (*shape_b, 1) if len(shape_b) == 1 else shape_b
    batch = g.output_shape()[: max(len(matrix_a), len(matrix_b)) - 2]
    matrix_y = (*batch, matrix_a[-2], matrix_b[-1])

    def operand(tensor: str, shape: tuple[int, ...], matrix: tuple[int, ...]) -> str:
        return tensor if shape == matrix else reshape(g, tensor, matrix)

    if g.wants(1):
        dy = operand(g.dy, g.output_shape(), matrix_y)
        a = operand(g.x(0), shape_a, matrix_a)
        if len(matrix_b) == 2:
            rows = math.prod(matrix_a[:-1])
            flat_a = operand(a, matrix_a, (rows, matrix_a[-1]))
            flat_dy = operand(dy, matrix_y, (rows, matrix_y[-1]))
            gradient = _gemm(g, flat_a, flat_dy, 1, 0)
        else:
            full = (*batch, matrix_b[-2], matrix_b[-1])
            gradient = product(g, a, dy, (len(matrix_a), len(matrix_y)), transpose_left=True)
            gradient = unbroadcast(g, gradient, full, matrix_b)
        g.give(1, operand(gradient, matrix_b, shape_b))
    if g.wants(0):
        dy = operand(g.dy, g.output_shape(), matrix_y)
        b = operand(g.x(1), shape_b, matrix_b)
        if len(matrix_b) == 2:
            rows = math.prod(matrix_y[:-1])
            flat_dy = operand(dy, matrix_y, (rows, matrix_y[-1]))
            gradient = _gemm(g, flat_dy, b, 0, 1)
            gradient = operand(gradient, (rows, matrix_b[-2]), shape_a)
        else:
            full = (*batch, matrix_a[-2], matrix_a[-1])
            gradient = product(g, dy, b, (len(matrix_y), len(matrix_b)), transpose_right=True)
            gradient = unbroadcast(g, gradient, full, matrix_a)
            gradient = operand(gradient, matrix_a, shape_a)
        g.give(0, gradient)
