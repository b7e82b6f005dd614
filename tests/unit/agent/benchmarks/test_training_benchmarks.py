"""Test the training benchmarks on CPUs with gloo.

Most tests use the results of one launch of two ranks. The launch runs the benchmarks with and without injected faults.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agent.benchmarks.collectives import overlap
from agent.benchmarks.training import (
    checkpoint,
    dataloader,
    fashion_mnist,
    model_parallel,
    training,
    training_loop,
    transformer,
)
from schemas.benchmarks.training import TRAINING
from schemas.catalogue import settings
from schemas.records import Observation
from tests import ROOT, training_ranks
from tests.unit.agent.benchmarks.test_benchmarks import (
    check_every_output_once,
    cpu_settings,
    observations,
    request,
    run_as_agent,
)

QUICK: dict[str, dict[str, Any]] = {
    "dataloader": {"workers": [1, 2], "batch_size": 8, "seconds": 0.2},
    "training": {"epochs": 2, "batch_size": 16, "max_steps": 3, "data_directories": []},
    "fashion_mnist": {"batch_size": 32, "max_steps": 60, "data_directories": []},
    "scaling": {"max_steps": 4, "batch_size": 16, "precision": "bf16", "workers": 1, "data_directories": []},
    "variants": {"variants": ["fp32", "bf16_channels_last", "fp1"], "batch_sizes": [2], "steps": 1},
    "checkpoint": {"steps": 2, "batch_size": 4},
    "model_parallel": {"steps": 6, "batch_size": 16, "width": 64},
    "transformer": {"steps": 4},
    "inference": {"steps": 8, "seconds": 0.1},
    "straggler": {"layers": 1, "width": 32, "heads": 2, "sequence": 16, "batch_size": 2, "seconds": 0.1},
    "overlap": {"size": 128, "size_bytes": 1 << 16, "repetitions": 2},
}
SETTINGS = cpu_settings(TRAINING, QUICK)
TORCHVISION = {"PYTHONPATH": str(ROOT / "tests" / "fakes" / "torchvision")}
"""Environment variables of the ranks. The `sitecustomize` module in this directory lets the ranks import the CUDA build of
torchvision with a CPU build of torch."""
NO_COMPILER = {"CXX": "/nonexistent/c++"}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all benchmarks in SETTINGS and the cases with injected faults in `training_ranks`; return the work directory."""
    work = tmp_path_factory.mktemp("ranks")
    run_as_agent(work, request(**SETTINGS), program=training_ranks.__name__, **TORCHVISION, **NO_COMPILER)
    return work


@pytest.fixture(scope="module")
def reported(work: Path) -> list[Observation]:
    """Return all observations of the ranks, with injected faults and without."""
    return observations(work)


@pytest.fixture(scope="module")
def measured(reported: list[Observation]) -> list[Observation]:
    """Return the observations without injected faults. The counts of collective operations are left out."""
    return [item for item in reported if item.stage == "benchmark" and item.name != "operations"]


def single(measured: list[Observation], name: str, **params: object) -> Observation:
    (observation,) = (item for item in measured if item.name == name and params.items() <= item.params.items())
    return observation


def number(measured: list[Observation], name: str) -> float:
    value = single(measured, name).value
    assert isinstance(value, float)
    return value


def test_every_catalogue_output_is_measured_once(measured: list[Observation]) -> None:
    check_every_output_once(SETTINGS, measured)


def test_only_the_figures_of_an_unknown_variant_are_unmeasured(measured: list[Observation]) -> None:
    # The variant `fp1` does not exist. The figures `straggler.cpu_…` cannot be measured on some Linux kernels.
    required = [item for item in measured if not item.name.startswith("straggler.cpu_")]
    absent = {(item.name, item.params["variant"], item.status) for item in required if item.status != "measured"}
    assert absent == {(f"variants.{kind}", "fp1", "error") for kind in ("throughput", "loss_finite")}


def test_missing_compiler_is_reported(work: Path) -> None:
    measured = observations(work / "alone")
    for kind in ("throughput", "loss_finite"):
        observation = single(measured, f"variants.{kind}", variant="bf16_channels_last_compiled")
        assert observation.status == "unsupported"
        assert "C++ compiler" in observation.reason


def test_fashion_mnist_learns_and_marks_its_data_as_synthetic(measured: list[Observation]) -> None:
    accuracy = single(measured, "fashion_mnist.accuracy")
    assert isinstance(accuracy.value, float)
    assert accuracy.value > 0.9
    assert accuracy.params["data"] == "synthetic"
    assert accuracy.params["graphed"] is False
    assert accuracy.params["learning_rate"] == pytest.approx(0.02)


def test_scaling_is_timed_from_the_launch(measured: list[Observation]) -> None:
    hookup, duration, throughput, accuracy, loss = (
        number(measured, f"scaling.{kind}") for kind in ("hookup", "duration", "throughput", "accuracy", "loss")
    )
    assert 0 < duration < hookup, "steps 2 to 4 must take less time than the launch and step 1"
    assert throughput == pytest.approx(3 * 16 * 2 / duration), "images per second must be those of steps 2 to 4"
    assert 0 <= accuracy <= 1
    assert loss == pytest.approx(2.3, abs=0.1), "the loss of an untrained network with ten classes must be about ln 10"
    params = single(measured, "scaling.loss").params
    assert {key: params[key] for key in ("data", "world_size", "batch_size", "precision", "max_steps")} == {
        "data": "synthetic",
        "world_size": 2,
        "batch_size": 16,
        "precision": "bf16",
        "max_steps": 4,
    }


@pytest.mark.parametrize("benchmark", ["model_parallel", "transformer"])
def test_loss_falls(measured: list[Observation], benchmark: str) -> None:
    assert 0 < number(measured, f"{benchmark}.loss_ratio") < 0.98


def test_flops_of_the_transformer_follow_from_its_weights(measured: list[Observation]) -> None:
    """A token takes 6 FLOP for each weight of the matrices, and 6 · layers · width · sequence FLOP for the attention."""
    shape = transformer.Shape(layers=2, width=64, heads=4, sequence=32, batch_size=2)
    model = transformer.Transformer(shape)
    weights = sum(part.weight.numel() for part in model.modules() if isinstance(part, torch.nn.Linear))
    flops, tokens = number(measured, "transformer.flops"), number(measured, "transformer.throughput")
    assert flops == pytest.approx(tokens * (6 * weights + 6 * 2 * 64 * 32))


def test_last_rank_of_each_step_does_not_wait(measured: list[Observation]) -> None:
    """`straggler.last_share` is the share of the steps in which a rank is the last to end its computation."""
    shares = [item.value for item in measured if item.name == "straggler.last_share"]
    waits = [item.samples for item in measured if item.name == "straggler.wait"]
    assert sum(share for share in shares if isinstance(share, float)) >= 1
    assert all(wait and wait.min >= 0 for wait in waits)
    assert min(wait.min for wait in waits if wait) == 0
    assert len({wait.n for wait in waits if wait}) == 1


def test_parts_of_a_step_are_shorter_than_the_step(measured: list[Observation]) -> None:
    step = single(measured, "straggler.step_time").samples
    assert step
    for scope in ("cpu=0", "cpu=1"):
        parts = [
            item.samples
            for item in measured
            if item.scope == scope and item.name in ("straggler.compute", "straggler.wait")
        ]
        assert all(part and part.max < step.max for part in parts)
    assert 0 < number(measured, "straggler.communication") < step.max


def test_checkpoint_is_read_back_identical_and_only_its_metadata_remains(
    measured: list[Observation], work: Path
) -> None:
    assert single(measured, "checkpoint.identical").value is True
    metadata = json.loads((work / "checkpoint0.json").read_text())
    assert (metadata["steps"], metadata["world_size"], metadata["parameters"]) == (2, 2, 431_080)
    assert not (work / "checkpoint0.pt").exists()


def test_trained_model_is_saved_with_metadata(measured: list[Observation], work: Path) -> None:
    metadata = json.loads((work / "convnet.json").read_text())
    expected = {"network": "convnet", "data": "synthetic", "world_size": 2, "epochs": 2, "batch_size": 16}
    assert expected.items() <= metadata.items()
    assert metadata["accuracy"] == single(measured, "training.accuracy").value
    state = torch.load(work / "convnet.pt", weights_only=True)
    training_loop.ConvNet().load_state_dict(state)
    assert metadata["parameters"] == sum(value.numel() for value in state.values()) == 431_080


def test_dataloader_reports_network_and_cpus(measured: list[Observation]) -> None:
    for observation in measured:
        if observation.name.startswith("dataloader."):
            assert isinstance(observation.value, float)
            assert observation.value > 0
            assert observation.params["network"] == "resnet18"
            assert observation.params["cpus_per_rank"] == len(os.sched_getaffinity(0)) / 2


LOAD = """
import sys, tempfile
from torch.utils.data import DataLoader
from agent.benchmarks.training.dataloader import forkserver
if __name__ == "__main__":
    for _ in range(2):
        loader = DataLoader([1, 2, 3], num_workers=1, multiprocessing_context=forkserver("agent.benchmarks.training.dataloader"))
        print([int(number) for number in loader])
    print(tempfile.gettempdir())
"""


@pytest.mark.parametrize("length", [75, 76])
def test_workers_load_data_however_long_the_path_of_the_temporary_directory_is(tmp_path: Path, length: int) -> None:
    """The workers' sockets are in the temporary directory. If its path has more than 75 bytes, they are in /dev/shm."""
    (tmp_path / "load.py").write_text(LOAD)
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        directory = Path(parent) / ("t" * (length - len(parent) - 1))
        directory.mkdir()
        done = subprocess.run(
            [sys.executable, tmp_path / "load.py"],
            env={**os.environ, "TMPDIR": str(directory), "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.stdout.splitlines() == ["[1, 2, 3]", "[1, 2, 3]", str(directory)], done.stderr


@pytest.mark.parametrize(("count", "replicas"), [(1, 0), (2, 1), (3, 1), (8, 4)])
def test_each_pair_of_ranks_of_a_host_has_one_replica(count: int, replicas: int) -> None:
    """A replica of the network uses two devices. A last rank without a partner has no replica."""
    assert [model_parallel.drives_replica(rank, count) for rank in range(count)].count(True) == replicas


@pytest.mark.parametrize(
    ("both", "hidden", "slowdown"),
    [(3.0, 1.0, 1.0), (5.0, 0.0, 5 / 3), (4.0, 0.5, 4 / 3), (6.0, 0.0, 2.0), (2.9, 1.0, 2.9 / 3)],
)
def test_overlap_figures_follow_from_three_times(both: float, hidden: float, slowdown: float) -> None:
    """The computation alone takes 3 s, the communication alone 2 s, and both at once take `both` seconds."""
    assert overlap.overlap_figures(3.0, 2.0, both) == pytest.approx((hidden, slowdown))


@pytest.mark.parametrize("images", [10_000, 60_000])
@pytest.mark.parametrize("ranks", [1, 8, 96, 256, 391, 512, 1024, 10_000])
@pytest.mark.parametrize("epochs", [1, 2])
def test_training_has_enough_steps_on_any_number_of_ranks(images: int, ranks: int, epochs: int) -> None:
    """All epochs together have at least MIN_STEPS steps. If a rank has too few images for that, it uses each several times."""
    chosen = settings("training", {"epochs": epochs})
    own, size = images // ranks, chosen["batch_size"]
    steps = training.steps_per_epoch(own, chosen)
    assert steps * epochs >= training.MIN_STEPS
    assert steps == own // size or own // size * epochs < training.MIN_STEPS
    order = torch.randperm(own)
    batches = training.batches(order, size, steps)
    assert [len(batch) for batch in batches] == [size] * steps
    assert torch.equal(torch.cat(list(batches))[:own], order[: size * steps])


def test_max_steps_limits_the_steps_of_an_epoch() -> None:
    assert training.steps_per_epoch(1000, settings("training", {"max_steps": 3})) == 3


def test_learning_rate_rises_and_falls() -> None:
    rates = fashion_mnist.learning_rates(100, 0.5)
    assert rates[0] == pytest.approx(0.05)
    assert rates.max() == rates[9] == pytest.approx(0.5)
    assert 0 <= rates[-1] < 0.001
    assert torch.all(rates[9:].diff() <= 0)
    assert fashion_mnist.learning_rates(1, 0.5).tolist() == [0.5]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda state: state["a"][0].view(torch.int32)[1].bitwise_xor_(1), "a.0"),
        (lambda state: state.pop("b"), "b"),
        (lambda state: state.update(b=2), "b"),
        (lambda state: state.update(c=1), "c"),
        (lambda state: state.update(a=[state["a"][0].double()]), "a.0"),
        (lambda state: state.update(a=[state["a"][0][:1]]), "a.0"),
    ],
)
def test_checkpoint_differences_are_exact_to_the_bit(change: Callable[[dict[str, Any]], object], name: str) -> None:
    first: dict[str, Any] = {"a": [torch.tensor([float("nan"), 1.0])], "b": 1}
    second: dict[str, Any] = {"a": [torch.tensor([float("nan"), 1.0])], "b": 1}
    assert checkpoint.find_differences(first, second) == []
    change(second)
    assert checkpoint.find_differences(first, second) == [name]


def test_image_is_augmented_differently_at_each_fetch() -> None:
    images = dataloader.AugmentedImages(torch.randint(0, 256, (3, 1, 28, 28), dtype=torch.uint8), torch.arange(3))
    (first, label), (second, _) = images[1], images[1]
    assert label == 1
    assert first.shape == (1, 28, 28)
    assert -1 <= first.min() < first.max() <= 1
    assert not torch.equal(first, second)


@pytest.fixture(scope="module")
def faulty(reported: list[Observation]) -> list[Observation]:
    """Return the observations with injected faults (`training_ranks`)."""
    return [item for item in reported if item.stage != "benchmark"]


def test_failure_on_one_rank_is_reported_on_all_ranks(faulty: list[Observation]) -> None:
    reasons = {item.scope: item.reason for item in faulty if item.name == "attempt"}
    assert reasons == {"cpu=0": "rank 1 failed; see its log", "cpu=1": "ValueError: no such thing"}


def test_parameter_with_one_bit_that_differs_between_ranks_is_counted(faulty: list[Observation]) -> None:
    assert {item.params["of"]: item.value for item in faulty if item.name == "differing"} == {"equal": 0, "one bit": 1}


@pytest.mark.parametrize(
    ("steps", "steps_per_epoch", "epochs"), [(1, 3750, 0.0002667), (1, 10**9, 1e-9), (60, 29, 2.069), (30, 20, 1.5)]
)
def test_number_of_epochs_of_a_shortened_training_is_above_zero(
    steps: int, steps_per_epoch: int, epochs: float
) -> None:
    assert fashion_mnist.epochs_of(steps, steps_per_epoch) == epochs


def test_fashion_mnist_reports_parameters_that_differ_between_ranks_as_wrong(faulty: list[Observation]) -> None:
    count, *results = (item for item in faulty if item.name.startswith("fashion_mnist."))
    assert (count.name, count.scope, count.status) == ("fashion_mnist.wrong_parameters", "host", "measured")
    assert float(str(count.value)) >= 1
    assert [item.status for item in results] == ["error"] * 3
    assert "wrong data" in results[0].reason


def test_losses_that_are_not_finite_are_counted_over_all_ranks(faulty: list[Observation]) -> None:
    losses = {(item.name, item.stage): (item.status, item.value) for item in faulty if item.name.startswith("losses.")}
    assert losses == {
        ("losses.loss_ratio", "finite"): ("measured", 0.5),
        ("losses.wrong_losses", "one NaN"): ("measured", 1),
        ("losses.loss_ratio", "one NaN"): ("error", None),
    }


def test_batch_larger_than_the_data_set_is_an_error_of_every_figure(faulty: list[Observation]) -> None:
    results = [item for item in faulty if item.name.startswith("training.")]
    assert {item.status for item in results} == {"error"}
    assert all("10000 images, batches of 1000000 on each of 2 ranks" in item.reason for item in results)


@pytest.mark.parametrize("given", [None, ":16:8"])
def test_deterministic_training_of_the_checkpoint_restores_the_environment(
    monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    monkeypatch.delenv(checkpoint.WORKSPACE, raising=False)
    if given:
        monkeypatch.setenv(checkpoint.WORKSPACE, given)
    with checkpoint._deterministic_algorithms():
        assert os.environ[checkpoint.WORKSPACE] == (given or ":4096:8")
        assert torch.are_deterministic_algorithms_enabled()
    assert os.environ.get(checkpoint.WORKSPACE) == given
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("fault", ["one bit on rank 1", "random state lost"])
def test_differing_checkpoint_is_reported(faulty: list[Observation], fault: str) -> None:
    identical = {item.stage: item.value for item in faulty if item.name == "checkpoint.identical"}
    assert identical[fault] is False


def test_unwritable_checkpoint_is_an_error_of_every_figure(faulty: list[Observation]) -> None:
    results = [item for item in faulty if item.stage == "no directory" and item.name.startswith("checkpoint.")]
    assert [item.status for item in results] == ["error"] * 3
    assert "FileNotFoundError" in results[0].reason


def test_all_ranks_count_the_same_collective_operations(reported: list[Observation]) -> None:
    """The supervisor (the agent's process that launches the ranks) compares the counts to find a rank that blocks the others."""
    counts: dict[object, list[object]] = {}
    for observation in reported:
        if observation.name == "operations":
            counts.setdefault(observation.params["benchmark"], []).append(observation.value)
    for benchmark in ("training", "model_parallel", "transformer", "straggler"):
        first, second = counts[benchmark]
        assert first == second, benchmark
        assert isinstance(first, int)
        assert first > 3
