"""A chain of layers with many equal activations and small weights."""

import numpy as np
import onnx
from onnx import numpy_helper, parser


def chain(layers: int = 10, batch: int = 2048, width: int = 16) -> onnx.ModelProto:
    """`layers` of a product and a Tanh over a batch, then four logits."""
    lines = []
    shapes = {}
    tensor = "x"
    for number in range(layers):
        lines.append(f"a{number} = MatMul({tensor}, w{number})  h{number} = Tanh(a{number})")
        shapes[f"w{number}"] = (width, width)
        tensor = f"h{number}"
    lines.append(f"y = MatMul({tensor}, v)")
    shapes["v"] = (width, 4)
    model = parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : 17]> g (float[{batch},{width}] x) => (float[{batch},4] y) '
        f"{{ {' '.join(lines)} }}"
    )
    generator = np.random.default_rng(0)
    for name, shape in shapes.items():
        value = generator.standard_normal(shape) / np.sqrt(width)
        model.graph.initializer.append(numpy_helper.from_array(value.astype(np.float32), name))
    return model
