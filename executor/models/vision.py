"""Convolutional networks of any depth, as sequences of layers: VGG (Simonyan and Zisserman, arXiv 1409.1556) and ResNet
with basic blocks (He et al., arXiv 1512.03385)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

CHANNELS = 3
_VGG_HIDDEN = 4096
_VGG_POOLED = 7  # pixels each way, of images of 224
_RESNET_STEM = 64


def vgg(convolutions: Sequence[int], classes: int = 1000) -> nn.Sequential:
    """A layer per convolution or linear map: ``convolutions`` in each of five stages, then three linear maps.

    Images are [n, 3, 224, 224]; stages have 64, 128, 256, 512 and 512 channels and end with a pooling.
    """
    layers: list[nn.Module] = []
    channels = CHANNELS
    for width, count in zip((64, 128, 256, 512, 512), convolutions, strict=True):
        for last in [False] * (count - 1) + [True]:
            pool = [nn.MaxPool2d(2)] if last else []
            layers.append(nn.Sequential(nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True), *pool))
            channels = width
    widths = (channels * _VGG_POOLED**2, _VGG_HIDDEN, _VGG_HIDDEN)
    for number, (wide, narrow) in enumerate(pairwise(widths)):
        flatten = [nn.Flatten()] if number == 0 else []
        layers.append(nn.Sequential(*flatten, nn.Linear(wide, narrow), nn.ReLU(inplace=True), nn.Dropout()))
    return nn.Sequential(*layers, nn.Linear(_VGG_HIDDEN, classes))


class BasicBlock(nn.Module):
    """Two convolutions beside a shortcut, [n, narrow, h, w] → [n, wide, h / stride, w / stride]."""

    def __init__(self, narrow: int, wide: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(narrow, wide, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(wide)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(wide, wide, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(wide)
        self.shortcut = nn.Sequential()
        if stride > 1 or narrow != wide:
            self.shortcut.append(nn.Conv2d(narrow, wide, 1, stride, bias=False)).append(nn.BatchNorm2d(wide))

    def forward(self, x: Tensor) -> Tensor:
        """Run the block. Does not work in place on x, which the shortcut takes too."""
        inner = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        result: Tensor = self.relu(inner + self.shortcut(x))
        return result


def resnet(blocks: Sequence[int], classes: int = 1000) -> nn.Sequential:
    """A layer per block: a stem, ``blocks`` in each of four stages (64, 128, 256 and 512 channels), and a head.

    Images are [n, 3, 224, 224].
    """
    stem = nn.Sequential(
        nn.Conv2d(CHANNELS, _RESNET_STEM, 7, 2, padding=3, bias=False),
        nn.BatchNorm2d(_RESNET_STEM),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, padding=1),
    )
    layers: list[nn.Module] = [stem]
    channels = _RESNET_STEM
    for stage, count in enumerate(blocks):
        width = _RESNET_STEM << stage
        for number in range(count):
            layers.append(BasicBlock(channels, width, stride=2 if number == 0 and stage else 1))
            channels = width
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
    return nn.Sequential(*layers, head)
