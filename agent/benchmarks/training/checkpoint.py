"""Save a checkpoint on every host, restore it on every rank, compare every bit, and continue the training.

The checkpoint contains the model, the optimizer, the step number and the random state. It is restored into a second trainer,
which was created with another seed. The state of the second trainer must then equal the saved state. After that both trainers
continue, and their states must stay equal: an error in the random state or the optimizer may show only in later steps.
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

from agent.benchmarks.runtime.agreement import attempt_on_all_ranks, log
from agent.benchmarks.runtime.context import Context
from agent.benchmarks.runtime.datasets import load
from agent.benchmarks.training.training_loop import ConvNet, FlatGradients, normalize
from schemas import documents

State = dict[str, Any]
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""Environment variable that makes cuBLAS deterministic. If it is set, torch starts small products more slowly (bf16 products of
1024 x 1024: 44 instead of 174 TFLOP/s, torch 2.11 on an H200), so it must not be set for other benchmarks."""


class Trainer:
    """Trains ConvNet with AdamW on synthetic images.

    The images of each batch, and the noise that is added to them, are random, so the weights depend on the random state too.
    """

    def __init__(self, context: Context, batch: int, seed: int) -> None:
        torch.manual_seed(seed)
        self._model = ConvNet().to(context.device)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=1e-3, fused=True if context.device.type == "cuda" else None
        )
        self._gradients = FlatGradients(self._model.parameters(), context.world_size)
        # The same on all ranks: all draw the same global batch, and each takes its own share of it.
        self._random = torch.Generator(context.device).manual_seed(seed)
        images = load("convnet", [])
        self._images, self._classes = images.train.to(context.device), images.train_classes.to(context.device)
        self._global_batch = batch * context.world_size
        self._own_share = slice(context.rank * batch, (context.rank + 1) * batch)
        self._steps = 0

    def train(self, steps: int) -> None:
        """Train for `steps` steps."""
        for _ in range(steps):
            indices = torch.randint(
                len(self._images), (self._global_batch,), generator=self._random, device=self._images.device
            )[self._own_share]
            images = normalize(self._images[indices])
            images += 0.1 * torch.rand(images.shape, generator=self._random, device=images.device)
            self._gradients.backward(nn.functional.cross_entropy(self._model(images), self._classes[indices]))
            self._optimizer.step()
            self._steps += 1

    def state(self) -> State:
        """Return a copy of the whole state."""
        return {
            "model": copy.deepcopy(self._model.state_dict()),
            "optimizer": copy.deepcopy(self._optimizer.state_dict()),
            "random": self._random.get_state(),
            "steps": self._steps,
        }

    def restore(self, state: State) -> None:
        """Load the whole state."""
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._random.set_state(state["random"].cpu())
        self._steps = int(state["steps"])


def run(context: Context, settings: Mapping[str, Any]) -> None:
    """Report the save time of the slowest host, the restore time of the slowest rank, and `checkpoint.identical`.

    `checkpoint.identical` is true if on every rank the states of the two trainers were bit-identical after the restore, and again
    after the steps that followed it.
    """
    with _deterministic_algorithms():
        _measure(context, settings["steps"], settings["batch_size"])


def _measure(context: Context, steps: int, batch: int) -> None:
    path = context.work / f"checkpoint{context.node}.pt"
    trainer, second = attempt_on_all_ranks(context, lambda: (Trainer(context, batch, 1), Trainer(context, batch, 2)))
    trainer.train(steps)
    state = trainer.state()
    context.synchronize()
    began = time.perf_counter()
    attempt_on_all_ranks(context, lambda: save(context, state, path) if context.is_reporting_rank else None)
    save_time = time.perf_counter() - began
    context.set_phase("checkpoint restore")
    began = time.perf_counter()
    attempt_on_all_ranks(
        context, lambda: second.restore(torch.load(path, map_location=context.device, weights_only=True))
    )
    context.synchronize()
    restore_time = time.perf_counter() - began
    differing = find_differences(state, second.state())
    trainer.train(steps)
    second.train(steps)
    differing += [f"{name} (after more steps)" for name in find_differences(trainer.state(), second.state())]
    if differing:
        log(f"checkpoint: the two trainers differ in {', '.join(differing)}")
    identical = context.sum_over_ranks(len(differing)) == 0
    save_time, restore_time = context.max_over_ranks([save_time, restore_time])
    if identical and context.is_reporting_rank:
        path.unlink()  # all ranks of the host have read the file; if states differ on any rank, it is kept as evidence
    context.report_world(
        {
            "checkpoint.identical": (identical, "1"),
            "checkpoint.save_time": (save_time, "s"),
            "checkpoint.restore_time": (restore_time, "s"),
        },
        network="convnet",
        optimizer="adamw",
        steps=steps,
        batch_size=batch,
        world_size=context.world_size,
    )


def save(context: Context, state: State, path: Path) -> None:
    """Write the checkpoint to disk and sync it; also write a JSON file that describes it."""
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


def find_differences(first: State, second: State) -> list[str]:
    """Return the dotted names of the values that only one of the states has, or that are not bit-identical in both."""
    first_leaves, second_leaves = _leaves(first), _leaves(second)
    return [
        name
        for name in sorted(first_leaves.keys() | second_leaves.keys())
        if name not in first_leaves
        or name not in second_leaves
        or not _is_identical(first_leaves[name], second_leaves[name])
    ]


def _is_identical(first: object, second: object) -> bool:
    if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)):
        return first == second
    alike = first.shape == second.shape and first.dtype == second.dtype and first.device == second.device
    return alike and torch.equal(_bytes(first), _bytes(second))  # as bytes, so that NaN equals itself


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _leaves(state: object, name: str = "") -> dict[str, object]:
    """Return dotted name -> value for every value in nested mappings and lists."""
    if isinstance(state, Mapping):
        parts: list[tuple[object, object]] = list(state.items())
    elif isinstance(state, (list, tuple)):
        parts = list(enumerate(state))
    else:
        return {name: state}
    return {key: leaf for part, value in parts for key, leaf in _leaves(value, f"{name}.{part}".strip(".")).items()}


@contextlib.contextmanager
def _deterministic_algorithms() -> Iterator[None]:
    """Make PyTorch use algorithms that give the same bits in every run. If an operation has none, PyTorch only warns."""
    # PyTorch warns about the backward pass of max pooling, because its atomic additions run in any order. Here the results are
    # reproducible all the same: the pooling windows do not overlap, so each element of the gradient is one value, not a sum.
    before, mode = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn, workspace = torch.backends.cudnn.benchmark, os.environ.get(WORKSPACE)
    os.environ.setdefault(WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=mode)
        torch.backends.cudnn.benchmark = cudnn
        if workspace is None:
            del os.environ[WORKSPACE]
