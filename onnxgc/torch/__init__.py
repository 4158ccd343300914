"""PyTorch: ONNX models as trainable modules, and plans for modules as they are.

The only place that imports torch.

Raises:
    RuntimeUnavailableError: PyTorch is not installed.
"""

from importlib.util import find_spec

from onnxgc.errors import RuntimeUnavailableError

if find_spec("torch") is None:
    raise RuntimeUnavailableError(
        "onnxgc.torch needs PyTorch, which is not installed: pip install 'onnxgc[torch]'"
    )

from onnxgc.torch.checkpointing import SavedTensor, TorchPlan, checkpoint, plans_of
from onnxgc.torch.exporting import export_training
from onnxgc.torch.onnx_module import OnnxModule, from_onnx

__all__ = [
    "OnnxModule",
    "SavedTensor",
    "TorchPlan",
    "checkpoint",
    "export_training",
    "from_onnx",
    "plans_of",
]
