"""The benchmarks that train, on CPUs and gloo: two real ranks at work, and two ranks of which one is made to fail."""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agent.benchmarks.collectives import overlap
from agent.benchmarks.runtime.context import Context
from agent.benchmarks.training import (
    checkpoint,
    dataloader,
    fashion_mnist,
    model_parallel,
    straggler,
    training,
    transformer,
    variants,
)
from schemas.catalogue import expand, settings
from schemas.records import Observation
from tests import ranks
from tests.unit.test_benchmarks import as_the_agent, observations, request, request_of

ROOT = Path(__file__).parents[2]
BENCHMARKS: dict[str, dict[str, Any]] = {
    "dataloader": {"workers": [1, 2], "batch_size": 8, "seconds": 0.2},
    "training": {"networks": ["convnet"], "epochs": 2, "batch_size": 16, "max_steps": 3, "data_directories": []},
    "fashion_mnist": {"epochs": 1, "batch_size": 32, "max_steps": 60, "data_directories": []},
    "scaling": {"max_steps": 4, "batch_size": 16, "precision": "bf16", "workers": 1, "data_directories": []},
    "variants": {
        "variants": ["fp32", "bf16_channels_last", "fp1"],
        "batch_sizes": [2],
        "compiled_variants": [],
        "steps": 1,
    },
    "checkpoint": {"steps": 2, "batch_size": 4},
    "model_parallel": {"steps": 6, "batch_size": 16, "width": 64},
    "transformer": {"layers": 2, "width": 64, "heads": 4, "sequence": 32, "batch_size": 2, "steps": 4},
    "straggler": {
        "layers": 1,
        "width": 32,
        "heads": 2,
        "sequence": 16,
        "batch_size": 2,
        "seconds": 0.1,
    },
    "overlap": {"size": 128, "size_bytes": 1 << 16, "repetitions": 2},
}


FITTING = {"PYTHONPATH": str(ROOT / "tests" / "fakes" / "torchvision")}
"""A torchvision that fits its torch."""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of them once."""
    work = tmp_path_factory.mktemp("ranks")
    as_the_agent(work, request(**BENCHMARKS), **FITTING)
    return work


@pytest.fixture(scope="module")
def found(work: Path) -> list[Observation]:
    return observations(work)


def _one(found: list[Observation], name: str, **params: object) -> Observation:
    (seen,) = (seen for seen in found if seen.name == name and params.items() <= seen.params.items())
    return seen


def test_every_output_of_the_catalogue_is_made_once_in_its_scope(found: list[Observation]) -> None:
    for name, chosen in BENCHMARKS.items():
        for item in expand("benchmark", name, chosen, "cpu"):
            scopes = ["cpu=0", "cpu=1"] if item.scope == "device" else ["host"]
            seen = [each for each in found if each.name == item.name and item.params.items() <= each.params.items()]
            assert [each.scope for each in seen] == scopes, item


def test_all_is_measured_but_what_cannot_be(found: list[Observation]) -> None:
    demanded = [seen for seen in found if not seen.name.startswith("straggler.cpu_")]  # not every kernel tells those
    absent = {(seen.name, seen.params["variant"], seen.status) for seen in demanded if seen.status != "measured"}
    assert absent == {(f"variants.{kind}", "fp1", "error") for kind in ("throughput", "loss_finite")}


def test_compiler_that_is_not_there_is_named(tmp_path: Path) -> None:
    """One rank, and a small network: what torch.compile does before it misses the compiler takes seconds of a processor."""
    request_of(tmp_path, request(variants={"variants": [], "compiled_batch_sizes": [8], "steps": 2}))
    started = ranks.start(__name__, "uncompiled", work=tmp_path, ranks=1)
    assert started.end() == [0], started.printed.read_text()
    found = observations(tmp_path)
    for kind in ("throughput", "loss_finite"):
        seen = _one(found, f"variants.{kind}", variant="bf16_channels_last_compiled")
        assert seen.status == "unsupported"
        assert "C++ compiler" in seen.reason


def _uncompiled() -> None:
    os.environ["CXX"] = "/nonexistent/c++"
    variants.network = lambda name: torch.nn.Sequential(  # type: ignore[assignment]
        torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4 * 30 * 30, 10)
    )
    sys.argv[1:] = ["--request", "request.json"]
    runpy.run_module("agent.benchmarks", run_name="__main__", alter_sys=True)


def test_fashion_mnist_learns_and_says_that_its_data_are_synthetic(found: list[Observation]) -> None:
    accuracy = _one(found, "fashion_mnist.accuracy")
    assert isinstance(accuracy.value, float)
    assert accuracy.value > 0.9
    assert accuracy.params["data"] == "synthetic"
    assert accuracy.params["graphed"] is False
    assert accuracy.params["learning_rate"] == pytest.approx(0.02)


def test_a_cell_is_timed_from_its_launch_and_tested_as_the_experiment_was(found: list[Observation]) -> None:
    hookup, duration, throughput, accuracy, loss = (
        _one(found, f"scaling.{kind}") for kind in ("hookup", "duration", "throughput", "accuracy", "loss")
    )
    assert isinstance(hookup.value, float)
    assert isinstance(duration.value, float)
    assert 0 < duration.value < hookup.value, "three steps against all that came before them"
    assert throughput.value == pytest.approx(3 * 16 * 2 / duration.value), "the first step is no part of it"
    assert isinstance(accuracy.value, float)
    assert 0 <= accuracy.value <= 1
    assert loss.value == pytest.approx(2.3, abs=0.1), "the mean over ten classes of which nothing is known yet"
    assert {key: loss.params[key] for key in ("data", "world_size", "batch_size", "precision", "max_steps")} == {
        "data": "synthetic",
        "world_size": 2,
        "batch_size": 16,
        "precision": "bf16",
        "max_steps": 4,
    }


@pytest.mark.parametrize("benchmark", ["model_parallel", "transformer"])
def test_loss_falls(found: list[Observation], benchmark: str) -> None:
    ratio = _one(found, f"{benchmark}.loss_ratio").value
    assert isinstance(ratio, float)
    assert 0 < ratio < 0.98


def test_transformer_counts_its_flops(found: list[Observation]) -> None:
    """Six a token for each weight of its matrices but the embedding, and 6 · layers · width · sequence for the attention."""
    tokens, flops = _one(found, "transformer.throughput").value, _one(found, "transformer.flops").value
    model = transformer.Transformer(2, 64, 4)
    weights = sum(part.weight.numel() for part in model.modules() if isinstance(part, torch.nn.Linear))
    assert isinstance(tokens, float)
    assert flops == pytest.approx(tokens * (6 * weights + 6 * 2 * 64 * 32))


def test_of_each_step_somebody_is_the_last_and_waits_for_nobody(found: list[Observation]) -> None:
    shares = [seen.value for seen in found if seen.name == "straggler.last_share"]
    waits = [seen.samples for seen in found if seen.name == "straggler.wait"]
    assert sum(share for share in shares if isinstance(share, float)) >= 1
    assert all(wait and wait.min >= 0 for wait in waits)
    assert min(wait.min for wait in waits if wait) == 0
    assert len({wait.n for wait in waits if wait}) == 1


def test_computing_waiting_and_communication_make_up_the_step(found: list[Observation]) -> None:
    (whole,) = (seen.samples for seen in found if seen.name == "straggler.step_time")
    (communication,) = (seen.value for seen in found if seen.name == "straggler.communication")
    assert whole
    assert isinstance(communication, float)
    for rank in ("cpu=0", "cpu=1"):
        parts = [
            seen.samples
            for seen in found
            if seen.scope == rank and seen.name in ("straggler.compute", "straggler.wait")
        ]
        assert all(part and part.max < whole.max for part in parts)
    assert 0 < communication < whole.max


def test_checkpoint_comes_back_and_leaves_its_metadata(found: list[Observation], work: Path) -> None:
    assert _one(found, "checkpoint.identical").value is True
    metadata = json.loads((work / "checkpoint0.json").read_text())
    assert (metadata["steps"], metadata["world_size"], metadata["parameters"]) == (2, 2, 431_080)
    assert not (work / "checkpoint0.pt").exists()


def test_trained_model_is_saved_with_what_is_known_of_it(found: list[Observation], work: Path) -> None:
    metadata = json.loads((work / "convnet.json").read_text())
    expected = {"network": "convnet", "data": "synthetic", "world_size": 2, "epochs": 2, "batch_size": 16}
    assert expected.items() <= metadata.items()
    assert metadata["accuracy"] == _one(found, "training.accuracy").value
    state = torch.load(work / "convnet.pt", weights_only=True)
    training.ConvNet().load_state_dict(state)
    assert metadata["parameters"] == sum(value.numel() for value in state.values()) == 431_080


def test_dataloader_says_whom_it_feeds_with_how_many_cpus(found: list[Observation]) -> None:
    for seen in found:
        if seen.name.startswith("dataloader."):
            assert isinstance(seen.value, float)
            assert seen.value > 0
            assert seen.params["network"] == "resnet18"
            assert seen.params["cpus_per_rank"] == len(os.sched_getaffinity(0)) / 2


@pytest.mark.parametrize(("ranks", "replicas", "left_out"), [(1, 0, 1), (2, 1, 0), (3, 1, 1), (8, 4, 0)])
def test_pairs_of_devices(ranks: int, replicas: int, left_out: int) -> None:
    leaders = [rank for rank in range(ranks) if model_parallel.drives_a_replica(rank, ranks)]
    assert len(leaders) == replicas
    assert ranks - 2 * len(leaders) == left_out


@pytest.mark.parametrize(
    ("both", "hidden", "slowdown"),
    [(3.0, 1.0, 1.0), (5.0, 0.0, 5 / 3), (4.0, 0.5, 4 / 3), (6.0, 0.0, 2.0), (2.9, 1.0, 2.9 / 3)],
)
def test_overlap_figures(both: float, hidden: float, slowdown: float) -> None:
    assert overlap.figures(3.0, 2.0, both) == pytest.approx((hidden, slowdown))


def test_rates_rise_and_fall() -> None:
    rates = fashion_mnist.rates(100, 0.5)
    assert rates[0] == pytest.approx(0.05)
    assert rates.max() == rates[9] == pytest.approx(0.5)
    assert 0 <= rates[-1] < 0.001
    assert torch.all(rates[9:].diff() <= 0)
    assert fashion_mnist.rates(1, 0.5).tolist() == [0.5]


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
def test_differences_are_found_to_the_bit(change: Callable[[dict[str, Any]], object], name: str) -> None:
    one: dict[str, Any] = {"a": [torch.tensor([float("nan"), 1.0])], "b": 1}
    other: dict[str, Any] = {"a": [torch.tensor([float("nan"), 1.0])], "b": 1}
    assert checkpoint.differences(one, other) == []
    change(other)
    assert checkpoint.differences(one, other) == [name]


def test_pictures_are_transformed_each_on_its_own() -> None:
    pictures = dataloader.Pictures(torch.randint(0, 256, (3, 1, 28, 28), dtype=torch.uint8), torch.arange(3))
    (first, label), (second, _) = pictures[1], pictures[1]
    assert label == 1
    assert first.shape == (1, 28, 28)
    assert -1 <= first.min() < first.max() <= 1
    assert not torch.equal(first, second)


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> list[Observation]:
    """What two ranks report while one of them does wrong: `_at_fault` below."""
    work = tmp_path_factory.mktemp("faults")
    started = ranks.start(__name__, "at_fault", work=work)
    assert started.end() == [0, 0], started.printed.read_text()
    return observations(work)


def test_rank_that_cannot_go_on_is_named_by_the_others(faults: list[Observation]) -> None:
    reasons = {seen.scope: seen.reason for seen in faults if seen.name == "attempt"}
    assert reasons == {"cpu=0": "rank 1 could not, as its log says", "cpu=1": "ValueError: no such thing"}


def test_parameters_that_differ_between_ranks_are_counted(faults: list[Observation]) -> None:
    assert {seen.params["of"]: seen.value for seen in faults if seen.name == "differing"} == {"equal": 0, "one bit": 1}


def test_training_after_which_ranks_differ_is_an_error(faults: list[Observation]) -> None:
    seen = [seen for seen in faults if seen.name.startswith("fashion_mnist.")]
    assert [each.status for each in seen] == ["error"] * 3
    assert "differ between the ranks" in seen[0].reason


@pytest.mark.parametrize("fault", ["one bit on rank 1", "random state lost"])
def test_checkpoint_that_differs_is_found(faults: list[Observation], fault: str) -> None:
    identical = [seen for seen in faults if seen.name == "checkpoint.identical"]
    assert {seen.stage: seen.value for seen in identical}[fault] is False


def test_checkpoint_that_cannot_be_written_is_an_error_on_all_ranks(faults: list[Observation]) -> None:
    seen = [seen for seen in faults if seen.stage == "no directory"]
    assert [each.status for each in seen] == ["error"] * 3
    assert "FileNotFoundError" in seen[0].reason


def test_every_rank_counts_the_same_operations_of_all_ranks(faults: list[Observation]) -> None:
    """By these counts the heartbeats tell who keeps the others waiting: also where some ranks have nothing to train."""
    counted: dict[object, list[object]] = {}
    for seen in faults:
        if seen.name == "operations":
            counted.setdefault(seen.params["benchmark"], []).append(seen.value)
    assert counted.keys() == {"training", "model_parallel", "transformer", "straggler"}
    for benchmark, (first, second) in counted.items():
        assert first == second, benchmark
        assert isinstance(first, int)
        assert first > 3


def _at_fault() -> None:
    from agent.benchmarks.__main__ import _context, _meeting_place
    from agent.benchmarks.runtime.context import join

    context = _context(request(), Path.cwd(), *_meeting_place())
    join(context)
    with pytest.MonkeyPatch.context() as patch:
        _attempt_fails(context)
        _parameters_differ(context, patch)
        _checkpoint_differs(context, patch)
    _operations_are_counted(context)
    context.save()
    torch.distributed.destroy_process_group()
    os._exit(0)  # a thread of gloo that is still at work ends the process with SIGABRT otherwise


def _attempt_fails(context: Context) -> None:
    def work() -> None:
        if context.rank == 1:
            raise ValueError("no such thing")

    try:
        training.attempt(context, work)
    except training.CannotMeasureError as problem:
        context.absent("attempt", unit="1", scope=context.device_scope, status=problem.status, reason=str(problem))


def _parameters_differ(context: Context, patch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    model = training.ConvNet()
    for of in ("equal", "one bit"):
        if of == "one bit" and context.rank == 1:
            next(model.parameters()).data.view(torch.int32)[3, 0, 2, 2] ^= 1
        unlike = fashion_mnist.differing(context, model)
        if context.rank == 0:
            context.measured("differing", unlike, unit="1", scope="host", of=of)
    backward = fashion_mnist.Averaged.backward

    def wrong(self: fashion_mnist.Averaged, loss: torch.Tensor) -> None:
        backward(self, loss)
        self._flat[7] += context.rank

    with patch.context() as inner:
        inner.setattr(fashion_mnist.Averaged, "backward", wrong)
        few = {"epochs": 1, "batch_size": 16, "max_steps": 3, "data_directories": []}
        fashion_mnist.run(context, settings("fashion_mnist", few))


def _checkpoint_differs(context: Context, patch: pytest.MonkeyPatch) -> None:
    load, few = torch.load, {"steps": 1, "batch_size": 4}

    def flipped(*arguments: Any, **options: Any) -> Any:
        state = load(*arguments, **options)
        if context.rank == 1:
            state["model"]["head.3.bias"].view(torch.int32)[0] ^= 1
        return state

    def forgetful(*arguments: Any, **options: Any) -> Any:
        return {**load(*arguments, **options), "random": torch.Generator().manual_seed(9).get_state()}

    for context.stage, loaded in (("one bit on rank 1", flipped), ("random state lost", forgetful)):
        with patch.context() as inner:
            inner.setattr(torch, "load", loaded)
            checkpoint.run(context, few)
    context.stage, work, context.work = "no directory", context.work, context.work / "nowhere"
    checkpoint.run(context, few)
    context.work = work


def _operations_are_counted(context: Context) -> None:
    context.stage = "counted"
    for module in (training, model_parallel, transformer, straggler):
        name, before = module.__name__.rpartition(".")[2], context.heart._sequence
        context.begin(name)
        module.run(context, settings(name, BENCHMARKS[name]))
        count = context.heart._sequence - before
        context.measured("operations", count, unit="1", scope=context.device_scope, benchmark=name)


if __name__ == "__main__":
    {"at_fault": _at_fault, "uncompiled": _uncompiled}[sys.argv[1]]()
