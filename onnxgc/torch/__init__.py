"""PyTorch: ONNX models as trainable modules, plans for modules, and exports for training.

The only package that imports torch.

Raises:
    RuntimeUnavailableError: PyTorch is not installed.
"""

from importlib.util import find_spec

from onnxgc.errors import RuntimeUnavailableError

if find_spec("torch") is None:
    raise RuntimeUnavailableError("onnxgc.torch needs PyTorch, which is not installed: pip install 'onnxgc[torch]'")

from onnxgc.torch.checkpointing import checkpoint, plans_of
from onnxgc.torch.compiling import Partitioner
from onnxgc.torch.exporting import export_training
from onnxgc.torch.largest_batch import LargestBatch, largest_batch
from onnxgc.torch.onnx_module import OnnxModule, from_onnx
from onnxgc.torch.plan_search import SavedTensor, TorchPlan

__all__ = [
    "LargestBatch",
    "OnnxModule",
    "Partitioner",
    "SavedTensor",
    "TorchPlan",
    "checkpoint",
    "export_training",
    "from_onnx",
    "largest_batch",
    "plans_of",
]
