"""Run the training benchmarks on two ranks, with and without injected faults.

The request (`request.json`: benchmarks and settings) is run as `agent.benchmarks` runs it. All cases run in the same processes,
because to import torch and to create the process group takes more time than the benchmarks. This module must not import test
modules, because each worker process of the benchmark `dataloader` imports this module and all its imports again.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from agent.benchmarks.__main__ import connect_store, create_context
from agent.benchmarks.local_runner import run_benchmark, run_local
from agent.benchmarks.runtime.agreement import CannotMeasureError, attempt_on_all_ranks
from agent.benchmarks.runtime.context import Context, join_process_group
from agent.benchmarks.training import fashion_mnist, training_loop, variants
from schemas.catalogue import BENCHMARKS

FAULTS = "faults"
"""Stage name in the observations of most injected faults. Other faults have a stage name of their own, to tell them apart."""


def main() -> None:
    """Run the benchmarks that request.json lists, and all cases with injected faults.

    For each benchmark that needs the process group, report as `operations` how many collective operations the heartbeat counted.
    At the end, rank 0 measures torch.compile without the other rank. It writes the observations to the directory `alone`. The
    caller has hidden the C++ compiler, so torch.compile fails.
    """
    requested = json.loads(Path("request.json").read_text(encoding="utf-8"))
    stage, settings = requested["stage"], requested["benchmarks"]
    context = create_context(requested, Path.cwd(), *connect_store())
    run_local(context, settings)
    join_process_group(context)
    context.stage = FAULTS
    _attempt_fails(context)
    _parameters_differ(context)
    _checkpoint_differs(context)
    _losses_are_not_finite(context)
    run_benchmark(context, "training", {"networks": ["convnet"], "batch_size": 1_000_000, "data_directories": []})
    context.stage = stage
    for name in settings:
        if BENCHMARKS[name].needs_group:
            before = context.heartbeat._sequence
            run_benchmark(context, name, settings[name])
            count = context.heartbeat._sequence - before
            context.report("operations", count, unit="1", scope=context.device_scope, benchmark=name)
    context.save()
    torch.distributed.destroy_process_group()
    if context.rank == 0:
        _compile(requested)
    # A normal exit could end with SIGABRT, because a thread of gloo may still run.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _attempt_fails(context: Context) -> None:
    def work() -> None:
        if context.rank == 1:
            raise ValueError("no such thing")

    try:
        attempt_on_all_ranks(context, work)
    except CannotMeasureError as problem:
        scope = context.device_scope
        context.report_absent("attempt", unit="1", scope=scope, status=problem.status, reason=str(problem))


def _parameters_differ(context: Context) -> None:
    torch.manual_seed(1)
    model = training_loop.ConvNet()
    for case in ("equal", "one bit"):
        if case == "one bit" and context.rank == 1:
            next(model.parameters()).data.view(torch.int32)[3, 0, 2, 2] ^= 1
        differing = fashion_mnist.count_differing_parameters(model)
        if context.rank == 0:
            context.report("differing", differing, unit="1", scope="host", of=case)
    backward = training_loop.FlatGradients.backward

    def wrong_backward(self: training_loop.FlatGradients, loss: torch.Tensor) -> None:
        backward(self, loss)
        self._flat[7] += context.rank

    with patch.object(training_loop.FlatGradients, "backward", wrong_backward):
        settings = {"epochs": 1, "batch_size": 16, "max_steps": 3, "data_directories": []}
        run_benchmark(context, "fashion_mnist", settings)


def _losses_are_not_finite(context: Context) -> None:
    stage = context.stage
    for case, middle in (("finite", 1.5), ("one NaN", math.nan if context.rank == 1 else 1.5)):
        context.stage = case
        training_loop.report_losses(context, "losses", [2.0, middle, 1.0])
    context.stage = stage


def _checkpoint_differs(context: Context) -> None:
    load, settings, stage = torch.load, {"steps": 1, "batch_size": 4}, context.stage

    def flip_bit(*arguments: Any, **options: Any) -> Any:
        state = load(*arguments, **options)
        if context.rank == 1:
            state["model"]["head.3.bias"].view(torch.int32)[0] ^= 1
        return state

    def lose_random_state(*arguments: Any, **options: Any) -> Any:
        return {**load(*arguments, **options), "random": torch.Generator().manual_seed(9).get_state()}

    for context.stage, faulty_load in (("one bit on rank 1", flip_bit), ("random state lost", lose_random_state)):
        with patch.object(torch, "load", faulty_load):
            run_benchmark(context, "checkpoint", settings)

    context.stage = "no directory"
    with patch.object(torch, "save", side_effect=FileNotFoundError("no such directory")):
        run_benchmark(context, "checkpoint", settings)
    context.stage = stage


def _compile(requested: dict[str, Any]) -> None:
    """Measure torch.compile on one rank. The network is small, so that torch.compile fails within seconds."""
    os.environ |= {"LOCAL_WORLD_SIZE": "1"}
    directory = Path("alone")
    directory.mkdir()
    alone = create_context(requested, directory, torch.distributed.HashStore(), 0, 1)
    join_process_group(alone)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10))
    with patch.object(variants, "build_network", lambda name: network):
        run_benchmark(alone, "variants", {"variants": [], "compiled_batch_sizes": [8], "steps": 2})


if __name__ == "__main__":
    main()
