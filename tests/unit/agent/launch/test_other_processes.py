"""Processes on the GPUs that do not belong to the launch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from agent.launch.other_processes import OtherProcessWatch
from tests import ROOT

RANK = os.getpid()
OTHER = os.getppid()
"""A running process that is neither this process, which is the supervisor here, nor one of its descendants."""


def others(*listed: dict[int, dict[int, str]]) -> dict[str, str]:
    """Return what a watch reports after it was given these lists of processes."""
    lists = iter(listed)
    watch = OtherProcessWatch([0, 1], lambda _: next(lists))
    for _ in listed:
        watch.look()
    return watch.others()


@pytest.fixture
def child() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid
        process.communicate(b"\n")


def test_other_process_is_named_with_its_gpu() -> None:
    assert others({0: {RANK: "python3"}, 1: {OTHER: "train"}}) == {"gpu=1": f"process {OTHER} (train)"}


def test_process_without_a_name_is_reported_by_its_id() -> None:
    assert others({0: {RANK: "", OTHER: ""}}) == {"gpu=0": f"process {OTHER}"}


def test_first_other_process_of_each_gpu_is_kept_after_it_has_left_the_gpu() -> None:
    assert others({0: {OTHER: "train"}}, {0: {RANK: ""}}, {0: {RANK: "", 1: "init"}}) == {
        "gpu=0": f"process {OTHER} (train)"
    }


def test_descendant_of_the_supervisor_is_not_another_process(child: int) -> None:
    assert others({0: {child: "python3"}}) == {}


def test_process_that_has_ended_is_not_reported(child: int) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert others({0: {child: "python3", ended.pid: "true"}}) == {}


HIDDEN = f"""
import os
from agent.launch.other_processes import OtherProcessWatch
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
assert not os.path.exists("/proc/{OTHER}")
watch = OtherProcessWatch([0], lambda _: {{0: {{os.getpid(): "python3", {OTHER}: "train"}}}})
watch.look()
print(watch.others())
"""
"""A program that cannot see the processes of other users."""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount /proc")
def test_process_that_proc_does_not_list_is_reported() -> None:
    mount = ("unshare", "--mount", "sh", "-c", 'mount -t proc -o hidepid=2 proc /proc && exec "$@"', "sh")
    done = subprocess.run([*mount, sys.executable, "-c", HIDDEN], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"{{'gpu=0': 'process {OTHER} (train)'}}\n"


@pytest.mark.parametrize("pid", [0, 2**32 - 1])
def test_number_that_is_no_process_is_not_reported(child: int, pid: int) -> None:
    assert others({0: {child: "python3", pid: ""}}) == {}


def test_nothing_is_reported_if_the_driver_lists_no_process_of_the_launch() -> None:
    """A container has process ids of its own: the ids that the driver lists may be those of other processes."""
    assert others({0: {OTHER: "python3"}}, {}) == {}


def test_watch_without_gpus_ends_at_once() -> None:
    watch = OtherProcessWatch([], lambda _: pytest.fail("a list was read"))
    with watch:
        watch.join(timeout=30)
        assert not watch.is_alive()
