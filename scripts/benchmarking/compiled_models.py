"""Networks for `torch.compile`, a fraction of their width in publications; each returns its loss."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention, silu

from scripts.exports.torch_models import UNet

_CLASSES = 10


class Bottleneck(nn.Module):
    """Source: He et al., Deep Residual Learning for Image Recognition, 2016, Figure 5."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)),
        )
        is_same = channels == out and stride == 1
        conv = nn.Conv2d(channels, out, 1, stride, bias=False)
        self.skip = nn.Identity() if is_same else nn.Sequential(conv, nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.skip(x))


class Classifier(nn.Module):
    """A network with the mean over positions, a linear layer and the cross-entropy."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(width, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found = self.body(x)
        mean = found.mean((2, 3)) if found.ndim == 4 else found.mean(1)
        return cross_entropy(self.head(mean), torch.arange(len(x)) % _CLASSES)


class Segmenter(UNet):
    def forward(self, x: Tensor) -> Tensor:
        return cross_entropy(super().forward(x), (x[:, 0] > 0).long())


class Patches(nn.Module):
    """Images of [N, 3, H, W] as tokens of [N, H W / 256, width]."""

    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(3, width, 16, 16)
        self.positions = nn.Parameter(0.02 * torch.randn(tokens, width))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.project(x).flatten(2).transpose(1, 2) + self.positions
        return found


class Block(nn.Module):
    """Attention and a feed-forward network on [N, T, width]: of GPT-2 and ViT, or gated as in Llama."""

    def __init__(self, width: int, heads: int, *, causal: bool = True, gated: bool = False) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) if gated else nn.LayerNorm(width) for _ in range(2))
        self.project, self.out = nn.Linear(width, 3 * width, not gated), nn.Linear(width, width, not gated)
        hidden = 8 * width // 3 if gated else 4 * width
        self.up, self.down = nn.Linear(width, (1 + gated) * hidden, not gated), nn.Linear(hidden, width, not gated)
        self.heads, self.causal, self.gated = heads, causal, gated

    def forward(self, x: Tensor) -> Tensor:
        parts = self.project(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = (rotated(parts[0]), rotated(parts[1]), parts[2]) if self.gated else parts
        found = scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        up = self.up(self.norms[1](x))
        if self.gated:
            a, b = up.chunk(2, -1)
            hidden = silu(a) * b
        else:
            hidden = gelu(up)
        result: Tensor = x + self.down(hidden)
        return result


def rotated(x: Tensor) -> Tensor:
    """Queries or keys of [N, heads, T, width] with rotary positions."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(x.shape[-2]), 10_000.0 ** (-torch.arange(half) / half))
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class Language(nn.Module):
    """Predicts each next token of [N, T]."""

    def __init__(self, layers: int, width: int, heads: int, words: int, gated: bool, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), None if gated else nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, gated=gated) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.words(ids)
        if self.places is not None:
            x = x + self.places.weight
        logits = self.head(self.norm(self.blocks(x)))
        return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def resnet(counts: Sequence[int]) -> nn.Module:
    layers, channels = list[nn.Module](), 16
    for stage, count in enumerate(counts):
        for index in range(count):
            layers.append(Bottleneck(channels, 16 << stage, 2 if stage and not index else 1))
            channels = 64 << stage
    stem = (nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    return Classifier(nn.Sequential(*stem, *layers), channels)


def vit(layers: int) -> nn.Module:
    blocks = (Block(192, 12, causal=False) for _ in range(layers))
    return Classifier(nn.Sequential(Patches(192, 196), *blocks, nn.LayerNorm(192)), 192)


def images(batch: int, size: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(batch, 3, size, size)


def tokens(batch: int, length: int, words: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, words, (batch, length))


@dataclass(frozen=True, slots=True)
class Model:
    """A module, whole in depth or small, its input, and the class of the blocks that users checkpoint."""

    build: Callable[[bool], nn.Module]
    data: Callable[[], Tensor]
    block: str = "Block"


MODELS: Mapping[str, Model] = {
    "resnet50": Model(lambda small: resnet((1, 1, 1, 1) if small else (3, 4, 6, 3)), images(8, 96), "Bottleneck"),
    "vit_b_16": Model(lambda small: vit(3 if small else 12), images(4, 224)),
    "gpt2": Model(lambda small: Language(3 if small else 12, 192, 12, 2000, False, 256), tokens(4, 256, 2000)),
    "llama": Model(lambda small: Language(2 if small else 8, 256, 8, 2000, True, 256), tokens(4, 256, 2000)),
    "unet": Model(lambda small: Segmenter(16, 2 if small else 4, _CLASSES), images(2, 128), "Sequential"),
    "llama_deep": Model(lambda small: Language(5 if small else 16, 128, 4, 500, True, 256), tokens(8, 256, 500)),
}
"""The last is the kind of network for which pytorch #197838 reports that less budget took more memory."""
