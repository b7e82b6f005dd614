"""A checkpoint: saved on every host, restored by every rank, compared to the bit, and trained on from.

Model, optimizer, step number and random numbers are one state. What is restored into a trainer that began differently must
be what was saved, and must go on as if nothing had happened: a lost random state or optimizer shows only there.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from agent.benchmarks.runtime.context import Context
from agent.benchmarks.runtime.datasets import load
from agent.benchmarks.training.fashion_mnist import Averaged
from agent.benchmarks.training.training import CannotMeasureError, ConvNet, attempt, log, normalize, tell_absent
from schemas import documents

State = dict[str, Any]


class Trainer:
    """ConvNet and AdamW on synthetic images, with noise on them, so that every part of the state matters."""

    def __init__(self, context: Context, batch: int, seed: int) -> None:
        torch.manual_seed(seed)
        self._model = ConvNet().to(context.device)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=1e-3, fused=True if context.device.type == "cuda" else None
        )
        self._gradients = Averaged(self._model, context.world_size)
        self._random = torch.Generator(context.device).manual_seed(seed)  # in step on all ranks
        images = load("convnet", [])
        self._images, self._classes = images.train.to(context.device), images.train_classes.to(context.device)
        self._whole, self._mine = batch * context.world_size, slice(context.rank * batch, (context.rank + 1) * batch)
        self._steps = 0

    def train(self, steps: int) -> None:
        """Trains on."""
        for _ in range(steps):
            drawn = torch.randint(len(self._images), (self._whole,), generator=self._random, device=self._images.device)
            images = normalize(self._images[drawn[self._mine]])
            images += 0.1 * torch.rand(images.shape, generator=self._random, device=images.device)
            self._gradients.backward(nn.functional.cross_entropy(self._model(images), self._classes[drawn[self._mine]]))
            self._optimizer.step()
            self._steps += 1

    def state(self) -> State:
        """A copy of all that a checkpoint holds."""
        return {
            "model": copy.deepcopy(self._model.state_dict()),
            "optimizer": copy.deepcopy(self._optimizer.state_dict()),
            "random": self._random.get_state(),
            "steps": self._steps,
        }

    def restore(self, state: State) -> None:
        """Takes over what a checkpoint holds."""
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._random.set_state(state["random"].cpu())
        self._steps = int(state["steps"])


def run(context: Context, settings: dict[str, Any]) -> None:
    """Reports whether every bit came back on every rank, and the slowest host's saving and the slowest rank's restoring."""
    try:
        with _deterministic():
            _measure(context, int(settings["steps"]), int(settings["batch_size"]))
    except CannotMeasureError as problem:
        tell_absent(context, "checkpoint", problem)


def _measure(context: Context, steps: int, batch: int) -> None:
    path = context.work / f"checkpoint{context.node}.pt"
    trainer, other = attempt(context, lambda: (Trainer(context, batch, 1), Trainer(context, batch, 2)))
    trainer.train(steps)
    had = trainer.state()
    context.synchronize()
    began = time.perf_counter()
    attempt(context, lambda: save(context, had, path) if context.speaks_for_world else None)
    saved = time.perf_counter() - began
    context.phase("checkpoint restore")
    began = time.perf_counter()
    attempt(context, lambda: other.restore(torch.load(path, map_location=context.device, weights_only=True)))
    context.synchronize()
    restored = time.perf_counter() - began
    unlike = differences(had, other.state())
    trainer.train(steps)
    other.train(steps)
    unlike += [f"resumed {name}" for name in differences(trainer.state(), other.state())]
    if unlike:
        log(f"checkpoint: differs in {', '.join(unlike)}")
    identical = context.total(len(unlike)) == 0
    saved, restored = context.slowest([saved, restored])
    if not context.speaks_for_world:
        return
    if identical:
        path.unlink()  # all ranks have read it; one that differs is evidence
    params: dict[str, Any] = {"network": "convnet", "optimizer": "adamw", "steps": steps, "batch_size": batch}
    params |= {"world_size": context.world_size, "scope": context.world_scope}
    context.measured("checkpoint.identical", identical, unit="1", **params)
    context.measured("checkpoint.save_time", saved, unit="s", **params)
    context.measured("checkpoint.restore_time", restored, unit="s", **params)


def save(context: Context, state: State, path: Path) -> None:
    """Writes the checkpoint to the disk itself, and beside it a JSON that says what it is."""
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    metadata = {
        "network": "convnet",
        "optimizer": "adamw",
        "data": "synthetic",
        "steps": state["steps"],
        "world_size": context.world_size,
        "parameters": sum(value.numel() for value in state["model"].values()),
        "size_bytes": path.stat().st_size,
        "torch": str(torch.__version__),
    }
    documents.write_text(path.with_suffix(".json"), json.dumps(metadata, allow_nan=False), durable=False)


def differences(one: State, other: State) -> list[str]:
    """Names of what is in one and not, to the bit, in the other."""
    first, second = _leaves(one), _leaves(other)
    return [
        name
        for name in sorted(first.keys() | second.keys())
        if name not in first or name not in second or not _same(first[name], second[name])
    ]


def _same(one: object, other: object) -> bool:
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return one == other
    alike = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
    return alike and torch.equal(_bytes(one), _bytes(other))  # as bytes: a number that is none equals itself


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _leaves(state: object, name: str = "") -> dict[str, object]:
    """Everything in nested mappings and lists, by dotted name."""
    if isinstance(state, Mapping):
        parts: list[tuple[object, object]] = list(state.items())
    elif isinstance(state, (list, tuple)):
        parts = list(enumerate(state))
    else:
        return {name: state}
    return {key: leaf for part, value in parts for key, leaf in _leaves(value, f"{name}.{part}".strip(".")).items()}


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Has PyTorch compute the same bits each time; it warns where it has no such way."""
    # Max pooling's backward pass adds with atomics, and warns: its windows do not overlap here, so nothing is added up.
    before, mode = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn.benchmark
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=mode)
        torch.backends.cudnn.benchmark = cudnn
