"""Test the batch script for Slurm with programs in place of those of Slurm and Rackproof. See also tests/lab/test_slurm.py."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import ROOT

SCONTROL = "echo n1; echo n2"
RACKPROOF = 'echo "$@" >>"$HOME/calls"; [ "$1" != report ] || exit 1'


def run_job(
    directory: Path, scontrol: str = SCONTROL, rackproof: str = RACKPROOF, **variables: str | None
) -> tuple[int, str, str]:
    """Run the batch script as a job; return exit code, standard error, and the calls of rackproof."""
    for name, text in {"scontrol": scontrol, "srun": "exit 0", "rackproof": rackproof}.items():
        (directory / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        (directory / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    programs = {"HOME": str(directory), "PATH": f"{directory}:/usr/bin:/bin", "RACKPROOF": f"{directory}/rackproof"}
    environment = {name: value for name, value in {**programs, **job, **variables}.items() if value is not None}
    done = subprocess.run(
        ["/bin/bash", ROOT / "deploy/slurm/rackproof.sbatch"],
        env=environment,
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    calls = directory / "calls"
    return done.returncode, done.stderr, calls.read_text(encoding="utf-8") if calls.exists() else ""


@pytest.mark.parametrize(
    ("restarts", "name"),
    [(None, "slurm-7"), ("0", "slurm-7"), ("1", "slurm-7-restart-1"), ("12", "slurm-7-restart-12")],
)
def test_each_start_of_a_requeued_job_is_a_run_of_its_own(tmp_path: Path, restarts: str | None, name: str) -> None:
    code, errors, calls = run_job(tmp_path, SLURM_RESTART_COUNT=restarts)
    run = tmp_path / "runs" / name
    assert (code, errors) == (1, "")
    assert calls == f"plan --hosts n1,n2 --profile standard --run-dir {run}\nreport {run}\n"


@pytest.mark.parametrize("count", ["2", "3"])
def test_heterogeneous_job_is_refused_before_it_plans(tmp_path: Path, count: str) -> None:
    code, errors, calls = run_job(tmp_path, SLURM_HET_SIZE=count)
    assert (code, calls) == (64, "")
    assert f"heterogeneous job has {count} components" in errors
    assert "submit a job for each" in errors


@pytest.mark.parametrize("code", [0, 1, 2, 64, 70, 75])
def test_exit_code_of_the_job_is_that_of_the_report(tmp_path: Path, code: int) -> None:
    assert run_job(tmp_path, rackproof=f'[ "$1" = plan ] || exit {code}')[0] == code


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"SLURM_JOB_ID": None}, 2),
        ({"SLURM_JOB_NODELIST": None}, 2),
        ({"SLURM_JOB_NUM_NODES": None}, 2),
        ({"scontrol": "exit 1"}, 2),
        ({"rackproof": "exit 1"}, 2),
        ({"rackproof": "exit 64"}, 64),
        ({"rackproof": "exit 75"}, 75),
        ({"RACKPROOF": "/nowhere/rackproof"}, 127),
    ],
)
def test_failure_of_the_batch_script_does_not_look_like_a_rejection(
    tmp_path: Path, options: dict[str, str | None], code: int
) -> None:
    assert run_job(tmp_path, **options)[0] == code
