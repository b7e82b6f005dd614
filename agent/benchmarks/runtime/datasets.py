"""Images for the training benchmarks: Fashion-MNIST and CIFAR-10 if they are on the host, otherwise synthetic ones.

Each figure is reported with the name of the data set, so that a figure from synthetic images can be recognized.

Nothing is downloaded. Nothing is unpickled either: the formats are IDX (Fashion-MNIST) and the binary version of CIFAR-10.
"""

from __future__ import annotations

import gzip
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

SYNTHETIC, FASHION_MNIST, CIFAR_10 = "synthetic", "fashion-mnist", "cifar-10"
LABELS = (SYNTHETIC, FASHION_MNIST, CIFAR_10)
CIFAR_RECORD = 1 + 3 * 32 * 32


@dataclass(frozen=True, kw_only=True)
class Images:
    """Images (N, channels, height, width) in uint8 and classes (N,) in int64, for training and for testing."""

    label: str
    train: torch.Tensor
    train_classes: torch.Tensor
    test: torch.Tensor
    test_classes: torch.Tensor


def load(network: str, directories: Sequence[str]) -> Images:
    """Return the images for `network`: Fashion-MNIST for `convnet`, CIFAR-10 for `resnet18`.

    If none of `directories` has this data set, return synthetic images.

    Raises:
        ValueError, OSError: the data set exists but cannot be read. Synthetic data never replace a broken file.
    """
    name, read = ("fashion-mnist", _fashion_mnist) if network == "convnet" else ("cifar-10-batches-bin", _cifar_10)
    for directory in directories:
        if (Path(directory) / name).is_dir():
            return read(Path(directory) / name)
    return _synthetic((1, 28, 28) if network == "convnet" else (3, 32, 32))


def _fashion_mnist(directory: Path) -> Images:
    return Images(
        label=FASHION_MNIST,
        train=read_idx(directory / "train-images-idx3-ubyte.gz").unsqueeze(1),
        train_classes=read_idx(directory / "train-labels-idx1-ubyte.gz").long(),
        test=read_idx(directory / "t10k-images-idx3-ubyte.gz").unsqueeze(1),
        test_classes=read_idx(directory / "t10k-labels-idx1-ubyte.gz").long(),
    )


def read_idx(path: Path) -> torch.Tensor:
    """Return the uint8 tensor in a gzipped IDX file. Raises OSError, or ValueError if it is not such a file or is truncated."""
    try:
        content = gzip.decompress(path.read_bytes())
    except (EOFError, gzip.BadGzipFile, gzip.zlib.error) as error:  # type: ignore[attr-defined]
        raise ValueError(f"{path}: {error}") from None
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise ValueError(f"{path}: not an IDX file of unsigned bytes")
    if len(content) < 4 + 4 * content[3]:
        raise ValueError(f"{path}: the header is truncated")
    shape = struct.unpack_from(f">{content[3]}I", content, 4)
    data = torch.frombuffer(bytearray(content[4 + 4 * content[3] :]), dtype=torch.uint8)
    if data.numel() != torch.Size(shape).numel():
        raise ValueError(f"{path}: {data.numel()} bytes of data; the header states the shape {shape}")
    return data.reshape(shape)


def _cifar_10(directory: Path) -> Images:
    paths = sorted(directory.glob("data_batch_*.bin"))
    if not paths:
        raise FileNotFoundError(f"{directory}: no data_batch_*.bin in it")
    train = torch.cat([_cifar_file(path) for path in paths])
    test = _cifar_file(directory / "test_batch.bin")
    return Images(
        label=CIFAR_10,
        train=train[:, 1:].reshape(-1, 3, 32, 32),
        train_classes=train[:, 0].long(),
        test=test[:, 1:].reshape(-1, 3, 32, 32),
        test_classes=test[:, 0].long(),
    )


def _cifar_file(path: Path) -> torch.Tensor:
    content = path.read_bytes()
    if not content or len(content) % CIFAR_RECORD:
        raise ValueError(
            f"{path}: {len(content)} bytes, not a multiple of {CIFAR_RECORD}, the size of a CIFAR-10 record"
        )
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(-1, CIFAR_RECORD)


def _synthetic(shape: tuple[int, int, int]) -> Images:
    """Return noisy copies of ten patterns. Every rank gets the same images.

    The patterns are easy to distinguish, so the accuracy shows whether the training works, and not how good the network is.
    """
    generator = torch.Generator().manual_seed(10)
    patterns = torch.randint(0, 160, (10, *shape), generator=generator, dtype=torch.uint8)

    def draw(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        classes = torch.randint(0, 10, (count,), generator=generator)
        noise = torch.randint(0, 96, (count, *shape), generator=generator, dtype=torch.uint8)
        return patterns[classes] + noise, classes

    train, train_classes = draw(10_000)
    test, test_classes = draw(2_000)
    return Images(label=SYNTHETIC, train=train, train_classes=train_classes, test=test, test_classes=test_classes)
