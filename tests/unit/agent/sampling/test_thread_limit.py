"""Detection of limits on processes and threads, from the counters of both versions of control groups and from output of ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent.gang.rank_state import MAX_TEXT
from agent.sampling.thread_limit import ThreadLimitWatch

OLD, LOCAL, FIRST = "before Linux 6.11", "since Linux 6.11", "version 1"


class PidsTree:
    """The /proc and /sys of a process in the control group `pod/container`; `kernel` is OLD, LOCAL or FIRST."""

    def __init__(self, root: Path, kernel: str, *, is_container: bool = False) -> None:
        """`is_container`: /proc/self/cgroup has the path on the host, but the container's group is mounted as the root."""
        self._kernel = kernel
        self._top = root / "sys/fs/cgroup" / ("pids" if kernel == FIRST else "")
        (root / "proc/self").mkdir(parents=True)
        line = "8:pids:/pod/container\n0::/\n" if kernel == FIRST else "0::/pod/container\n"
        (root / "proc/self/cgroup").write_text(line)
        for name, limit in {"": "512"}.items() if is_container else {"pod": "4096", "pod/container": "max"}.items():
            (self._top / name).mkdir(parents=True, exist_ok=True)
            (self._top / name / "pids.max").write_text(f"{limit}\n")
            self.count(name, 3, 3)

    def count(self, name: str, hits: int, local: int) -> None:
        """Write the counters of a group.

        `hits`: how often a limit was reached, including the limits of other groups. `local`: how often the group reached its own.
        """
        (self._top / name / "pids.events").write_text(f"max {hits}\n")
        if self._kernel == LOCAL:
            (self._top / name / "pids.events.local").write_text(f"max {local}\n")


@pytest.mark.parametrize(
    ("kernel", "group"), [(OLD, "pod/container"), (FIRST, "pod/container"), (LOCAL, "pod/container"), (LOCAL, "pod")]
)
def test_reached_limit_of_the_group_or_a_parent_group_is_described(tmp_path: Path, kernel: str, group: str) -> None:
    """Before Linux 6.11, the group of the process counts the limits of its parent groups too."""
    tree = PidsTree(tmp_path, kernel)
    watch = ThreadLimitWatch(tmp_path)
    assert watch.describe_hit() == ""
    tree.count(group, 4, 4)
    text = watch.describe_hit()
    assert text.startswith(
        "a control group of this launch reached its limit on processes and threads (pids.max is 4096): raise the limit"
    )
    assert len(text) < MAX_TEXT - 100, "the text and how the rank ended must fit into MAX_TEXT characters"
    assert ThreadLimitWatch(tmp_path).describe_hit() == "", "limits that were reached before the launch must not count"


def test_reached_limit_of_another_container_of_the_pod_is_not_described(tmp_path: Path) -> None:
    tree = PidsTree(tmp_path, LOCAL)
    watch = ThreadLimitWatch(tmp_path)
    tree.count("pod", 9, 3)
    assert watch.describe_hit() == ""


@pytest.mark.parametrize("kernel", [OLD, LOCAL, FIRST])
def test_group_of_a_container_is_found_although_proc_has_its_path_on_the_host(tmp_path: Path, kernel: str) -> None:
    tree = PidsTree(tmp_path, kernel, is_container=True)
    watch = ThreadLimitWatch(tmp_path)
    tree.count("", 4, 4)
    assert "(pids.max is 512)" in watch.describe_hit()


def test_host_without_counters_reports_no_limit(tmp_path: Path) -> None:
    assert ThreadLimitWatch(tmp_path).describe_hit() == ""


LIMIT = "import os, resource; resource.setrlimit(resource.RLIMIT_NPROC, (1, 1)); os.setgid(65534); os.setuid(65534)"


@pytest.mark.parametrize(
    ("modules", "call", "message"),
    [
        ("threading", "threading.Thread(target=print).start()", "can't start new thread"),
        ("torch", "torch.rand(2000, 2000).add(1).sum()", "Thread creation failed: Resource temporarily unavailable"),
        (
            "torch.distributed",
            "torch.distributed.TCPStore('127.0.0.1', 0, 1, True)",
            "RuntimeError: Resource temporarily unavailable",
        ),
    ],
    ids=["Python", "libgomp", "torch"],
)
def test_failure_to_create_a_thread_is_recognized_in_the_output_of_a_program(
    tmp_path: Path, modules: str, call: str, message: str
) -> None:
    """The kernel does not count how often the limit `ulimit -u` was reached, so only the output shows it."""
    done = subprocess.run(
        [sys.executable, "-c", f"import {modules}; {LIMIT}; {call}"],
        env={**os.environ, "OMP_NUM_THREADS": "4"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    text = ThreadLimitWatch(tmp_path).describe_hit(done.stderr)
    assert text.startswith("no thread could be created (")
    assert message in text


THROWN = "terminate called after throwing an instance of "


@pytest.mark.parametrize(
    ("output", "is_evidence"),
    [
        (f"{THROWN}'std::system_error'\n  what():  Resource temporarily unavailable\n", True),
        ("OMP: Error #34: System unable to allocate necessary resources for OMP thread:\nOMP: System error #11: Resource", True),
        ("OpenBLAS blas_thread_init: pthread_create failed for thread 1 of 2: Resource temporarily unavailable", True),
        ("NCCL WARN Call to pthread_create failed: Resource temporarily unavailable", True),
        (f"{THROWN}'std::system_error'\n  what():  Broken pipe\n", False),
        (f"{THROWN}'c10::DistBackendError'\n  what():  NCCL error", False),
        ("socketProgress: Call to recv failed : Resource temporarily unavailable", False),
        ("CUDA error: an illegal memory access was encountered", False),
        ("", False),
    ],
)  # fmt: skip
def test_only_failed_creation_of_threads_is_evidence(tmp_path: Path, output: str, is_evidence: bool) -> None:
    assert bool(ThreadLimitWatch(tmp_path).describe_hit(output)) == is_evidence
