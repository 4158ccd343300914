"""PyTorch models for exports and comparisons: modules, inputs and losses.

Weights are random, by the initialisation of each module. Dropout and stochastic depth have rate 0, so a
step is deterministic. Each model has a full size and a small one with the same operators: smaller images,
fewer layers or shorter sequences.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

_CLASSES = 10
_RATES = ("p", "drop_prob", "dropout", "attention_dropout", "dropout_p", "drop_rate")
# The range of noise on parameters that are initialised to one number, which makes all parameters different.
_NOISE = 0.1


class Recipe(StrEnum):
    """An exporter with options that preserve the parameters of a module.

    `dynamo` is the default of `torch.onnx.export`, without optimisation, on a module in evaluation mode;
    `script` is the older exporter in training mode.
    """

    DYNAMO = "dynamo"
    SCRIPT = "script"


@dataclass(frozen=True, slots=True)
class TorchModel:
    """A model: `build(small)` returns the module, `inputs(small)` a batch for its `forward`.

    `loss` is `cross-entropy` with the classes on `class_axis` of the output, or `mse`. `recipes` are the
    exporters that support the model.
    """

    build: Callable[[bool], nn.Module]
    inputs: Callable[[bool], dict[str, Tensor]]
    loss: str = "cross-entropy"
    class_axis: int = 1
    recipes: tuple[Recipe, ...] = tuple(Recipe)

    def module(self, small: bool, seed: int = 0) -> nn.Module:
        """The module in training mode, without random operators and without equal parameters."""
        torch.manual_seed(seed)
        module = self.build(small)
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
                    parameter.add_(_NOISE * (torch.rand_like(parameter) - 0.5))
        for part in module.modules():
            for rate in _RATES:
                if isinstance(getattr(part, rate, None), float):
                    setattr(part, rate, 0.0)
        return module.train()

    def batch(self, small: bool, seed: int = 1) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        return self.inputs(small)

    def target(self, output: Tensor, seed: int = 2) -> Tensor:
        """Labels, or random numbers of the output's shape, for an output of the module."""
        generator = torch.Generator().manual_seed(seed)
        if self.loss == "mse":
            return torch.randn(output.shape, generator=generator)
        shape = [size for axis, size in enumerate(output.shape) if axis != self.class_axis]
        return torch.randint(0, output.shape[self.class_axis], shape, generator=generator)

    def loss_of(self, output: Tensor, target: Tensor) -> Tensor:
        if self.loss == "mse":
            return nn.functional.mse_loss(output, target.to(output.dtype))
        return nn.functional.cross_entropy(output.movedim(self.class_axis, 1), target)


class _Output(nn.Module):
    """A module with one of the results of another module."""

    def __init__(self, module: nn.Module, key: str, names: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.module, self.key, self.names = module, key, names

    def forward(self, *inputs: Tensor) -> Tensor:
        named = dict(zip(self.names, inputs, strict=True)) if self.names else {}
        found = self.module(**named) if self.names else self.module(*inputs)
        result: Tensor = found[self.key] if isinstance(found, dict) else getattr(found, self.key)
        return result


class _Pyramid(nn.Module):
    """The maxima of each level of a feature pyramid, concatenated: [N, levels x channels]."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([level.amax(dim=(2, 3)) for level in self.backbone(x).values()], dim=1)


class UNet(nn.Module):
    """Encoder and decoder with transposed convolutions and skip connections.

    Source: Ronneberger et al., U-Net, 2015, Figure 1, with padded convolutions and batch normalisation.
    """

    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        pairs = list(pairwise(widths))
        self.stem = self._block(3, width)
        self.down = nn.ModuleList(self._block(a, b) for a, b in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in reversed(pairs))
        self.join = nn.ModuleList(self._block(b, a) for a, b in reversed(pairs))
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Conv2d(width, classes, 1)

    @staticmethod
    def _block(channels_in: int, channels_out: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for channels in (channels_in, channels_out):
            layers.append(nn.Conv2d(channels, channels_out, 3, padding=1))
            layers += [nn.BatchNorm2d(channels_out), nn.ReLU()]
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        levels = [self.stem(x)]
        for block in self.down:
            levels.append(block(self.pool(levels[-1])))
        x = levels.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([levels.pop(), up(x)], dim=1))
        result: Tensor = self.head(x)
        return result


class SequenceClassifier(nn.Module):
    """Embedding, a recurrent network, and a linear layer on its last step: [N, T] to [N, classes]."""

    def __init__(self, network: type[nn.LSTM] | type[nn.GRU], words: int, width: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.network = network(width, hidden, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * hidden, _CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        steps, _ = self.network(self.embedding(tokens))
        result: Tensor = self.head(steps[:, -1])
        return result


def _images(full: tuple[int, int], small: tuple[int, int]) -> Callable[[bool], dict[str, Tensor]]:
    """Batches of images; `full` and `small` are (images, pixels)."""

    def draw(is_small: bool) -> dict[str, Tensor]:
        images, pixels = small if is_small else full
        return {"x": torch.randn(images, 3, pixels, pixels)}

    return draw


def _torchvision(name: str, **options: Any) -> Callable[[bool], nn.Module]:
    def build(small: bool) -> nn.Module:
        models: Any = import_module("torchvision.models")
        module: nn.Module = models.get_model(name, weights=None, num_classes=_CLASSES if small else 1000, **options)
        return module

    return build


def _vit(small: bool) -> nn.Module:
    models: Any = import_module("torchvision.models")
    module: nn.Module = (
        models.VisionTransformer(64, 16, 3, 4, 96, 192, num_classes=_CLASSES)
        if small
        else models.vit_b_16(weights=None)
    )
    return module


def _fcn(small: bool) -> nn.Module:
    models: Any = import_module("torchvision.models.segmentation")
    classes = _CLASSES if small else 21
    options = {"weights": None, "weights_backbone": None, "aux_loss": False}
    return _Output(models.fcn_resnet50(num_classes=classes, **options), "out")


def _pyramid(small: bool) -> nn.Module:
    backbone_utils: Any = import_module("torchvision.models.detection.backbone_utils")
    name = "resnet18" if small else "resnet50"
    return _Pyramid(
        backbone_utils.resnet_fpn_backbone(
            backbone_name=name, weights=None, norm_layer=nn.BatchNorm2d, trainable_layers=5
        )
    )


def _unet(small: bool) -> nn.Module:
    return UNet(8, 2, 4) if small else UNet(64, 4, 21)


def _nasnet(small: bool) -> nn.Module:
    nasnet: Any = import_module("timm.models.nasnet")
    size = {"num_classes": _CLASSES, "stem_size": 12, "num_features": 24 * 24} if small else {}
    module: nn.Module = nasnet.NASNetALarge(**size)
    return module


def _bert(small: bool) -> nn.Module:
    transformers: Any = import_module("transformers")
    size: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    size |= {"intermediate_size": 128, "vocab_size": 300, "max_position_embeddings": 64}
    size = {"num_labels": 3, **(size if small else {})}
    config = transformers.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **size)
    return _Output(transformers.BertForSequenceClassification(config), "logits", ("input_ids", "attention_mask"))


def _gpt2(small: bool) -> nn.Module:
    transformers: Any = import_module("transformers")
    size: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 300, "n_positions": 64}
    size = {"use_cache": False, **(size if small else {})}
    config = transformers.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **size)
    return _Output(transformers.GPT2LMHeadModel(config), "logits", ("input_ids", "attention_mask"))


def _llama(small: bool) -> nn.Module:
    transformers: Any = import_module("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64 if small else 512,
        intermediate_size=172 if small else 1376,
        num_hidden_layers=2 if small else 8,
        num_attention_heads=4 if small else 8,
        num_key_value_heads=2 if small else 4,
        vocab_size=300 if small else 32000,
        max_position_embeddings=256 if small else 2048,
        use_cache=False,
    )
    return _Output(transformers.LlamaForCausalLM(config), "logits", ("input_ids",))


def _t5(small: bool) -> nn.Module:
    transformers: Any = import_module("transformers")
    size: dict[str, Any] = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    options: dict[str, Any] = {"use_cache": False, "decoder_start_token_id": 0}
    # torch's decomposition of the fused attention fails on T5's strides.
    options["attn_implementation"] = "eager"
    if small:
        options |= {**size, "vocab_size": 300}
    config = transformers.T5Config(dropout_rate=0.0, **options)
    return _Output(transformers.T5ForConditionalGeneration(config), "logits", ("input_ids", "decoder_input_ids"))


def _tokens(words: int, small_words: int, *names: str, steps: int = 128) -> Callable[[bool], dict[str, Tensor]]:
    def draw(small: bool) -> dict[str, Tensor]:
        shape = (2, 12) if small else (8, steps)
        return {name: torch.randint(1, small_words if small else words, shape) for name in names}

    return draw


def _masked(words: int, small: bool) -> dict[str, Tensor]:
    """Sentences of different lengths."""
    inputs = _tokens(words, 300, "input_ids")(small)
    sentences, steps = inputs["input_ids"].shape
    lengths = torch.randint(steps // 2, steps + 1, (sentences, 1))
    return {**inputs, "attention_mask": (torch.arange(steps) < lengths).long()}


def _recurrent(network: type[nn.LSTM] | type[nn.GRU]) -> TorchModel:
    return TorchModel(
        lambda small: SequenceClassifier(network, *((300, 24, 20) if small else (20000, 256, 512))),
        _tokens(20000, 300, "tokens"),
    )


TORCH_MODELS: Mapping[str, TorchModel] = {
    "resnet50": TorchModel(_torchvision("resnet50"), _images((16, 224), (4, 64))),
    "densenet121": TorchModel(_torchvision("densenet121"), _images((16, 224), (4, 64))),
    "inception_v3": TorchModel(
        _torchvision("inception_v3", aux_logits=False, init_weights=False), _images((16, 299), (4, 96))
    ),
    "vgg16": TorchModel(_torchvision("vgg16"), _images((16, 224), (4, 64))),
    "mobilenet_v3_large": TorchModel(_torchvision("mobilenet_v3_large"), _images((32, 224), (4, 64))),
    "efficientnet_b0": TorchModel(_torchvision("efficientnet_b0"), _images((16, 224), (4, 64))),
    "convnext_tiny": TorchModel(_torchvision("convnext_tiny"), _images((16, 224), (2, 64))),
    "swin_t": TorchModel(_torchvision("swin_t"), _images((8, 224), (2, 112))),
    "vit_b_16": TorchModel(_vit, _images((8, 224), (2, 64))),
    "fcn_resnet50": TorchModel(_fcn, _images((4, 224), (2, 64))),
    "unet": TorchModel(_unet, _images((4, 256), (2, 32))),
    "resnet_fpn": TorchModel(_pyramid, _images((4, 256), (2, 96)), "mse"),
    "nasnetalarge": TorchModel(_nasnet, _images((4, 331), (4, 96))),
    "bert": TorchModel(_bert, partial(_masked, 30522)),
    "gpt2": TorchModel(_gpt2, partial(_masked, 50257), class_axis=2),
    "llama": TorchModel(_llama, _tokens(32000, 300, "input_ids"), class_axis=2, recipes=(Recipe.DYNAMO,)),
    "t5": TorchModel(_t5, _tokens(32128, 300, "input_ids", "decoder_input_ids"), class_axis=2),
    "lstm": _recurrent(nn.LSTM),
    "gru": _recurrent(nn.GRU),
}
