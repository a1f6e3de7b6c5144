"""The networks of the protocols."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def perceptron(inputs: int, hidden: tuple[int, ...], outputs: int) -> nn.Module:
    """Linear layers with ReLUs between them."""
    widths = (inputs, *hidden)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], outputs))


def convolutional(channels: int, side: int, outputs: int, width: int = 32) -> nn.Module:
    """Four convolutions in two pairs, each pair halving the picture, and two linear layers (as Zenke 2017)."""
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(2 * width * (side // 4) ** 2, 512), nn.ReLU(), nn.Linear(512, outputs),
    )  # fmt: skip


class _Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(after)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(after)
        self.shortcut = (
            nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
            if stride != 1 or before != after
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        inner = self.second_norm(self.second(F.relu(self.first_norm(self.first(x)))))
        return F.relu(inner + self.shortcut(x))


def resnet(channels: int, outputs: int, width: int = 20) -> nn.Module:
    """A ResNet-18 with 20 channels to begin with instead of 64 (Lopez-Paz & Ranzato 2017), for small pictures."""
    layers: list[nn.Module] = [
        nn.Conv2d(channels, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
    ]  # fmt: skip
    before = width
    for stage, after in enumerate((width, 2 * width, 4 * width, 8 * width)):
        layers += [_Block(before, after, 1 if stage == 0 else 2), _Block(after, after, 1)]
        before = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, outputs))


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(width, 3 * width)
        self.outputs = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.inputs(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: Tensor = self.outputs(mixed.transpose(1, 2).reshape(batch, length, width))
        return found


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(width), _Attention(width, heads)
        self.inner_norm = nn.LayerNorm(width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        x = x + self.inner(self.inner_norm(x))
        return x


class Gpt(nn.Module):
    """A small causal transformer over bytes."""

    def __init__(self, vocabulary: int, length: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        self.layers = nn.Sequential(*(_Layer(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, codes: Tensor) -> Tensor:
        places = torch.arange(codes.shape[1], device=codes.device).expand_as(codes)
        found: Tensor = self.head(self.norm(self.layers(self.tokens(codes) + self.places(places))))
        return found
