"""The workflows in .github, as far as they can be looked at where no GitHub is: GitHub's own schema, and what they start."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PINNED = re.compile(r"[\w-]+/[\w./-]+@[0-9a-f]{40}")
EXPRESSION = re.compile(r"\$\{\{.*?\}\}")


def tool(name: str) -> str:
    """A program that came from PyPI, beside this Python."""
    return str(Path(sys.executable).parent / name)


def read(path: Path) -> dict[str, Any]:
    workflow: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return workflow


JOBS = [pytest.param(job, id=f"{path.stem}-{name}") for path in WORKFLOWS for name, job in read(path)["jobs"].items()]


def test_githubs_schema_takes_them() -> None:
    command = [tool("check-jsonschema"), "--builtin-schema", "vendor.github-workflows", *WORKFLOWS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_they_may_read_the_repository_and_no_more(path: Path) -> None:
    assert read(path)["permissions"] == {"contents": "read"}
    wider = {name for name, job in read(path)["jobs"].items() if job.get("permissions", {}) != {}}
    assert wider <= {"publish"}


def test_only_a_tag_publishes_and_only_what_ran_on_gpus() -> None:
    job = read(ROOT / ".github/workflows/image.yml")["jobs"]["publish"]
    assert job["permissions"] == {"contents": "read", "packages": "write"}
    assert job["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert set(job["needs"]) == {"rehearse", "gpu"}
    names = [step.get("name") for step in job["steps"]]
    assert names.index("Accept this machine with it") < names.index("Push it")


@pytest.mark.parametrize("job", JOBS)
def test_actions_are_pinned_and_leave_no_token_behind(job: dict[str, Any]) -> None:
    used = [step for step in job["steps"] if "uses" in step]
    assert all(PINNED.fullmatch(step["uses"]) for step in used)
    checkouts = [step for step in used if step["uses"].startswith("actions/checkout@")]
    assert checkouts
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_one_action_has_one_version() -> None:
    lines = [line.split("uses: ")[1] for path in WORKFLOWS for line in path.read_text().splitlines() if "uses:" in line]
    assert all(re.search(r" # v\d+\.\d+\.\d+$", line) for line in lines)
    assert len(set(lines)) == len({line.partition("@")[0] for line in lines})


@pytest.mark.parametrize("job", JOBS)
def test_self_hosted_runner_runs_no_foreign_code(job: dict[str, Any]) -> None:
    if "self-hosted" in job["runs-on"]:
        assert "github.event_name != 'pull_request'" in job["if"] or "refs/tags/" in job["if"]


@pytest.mark.parametrize("job", JOBS)
def test_shellcheck_finds_nothing_and_no_expression_is_in_a_script(job: dict[str, Any]) -> None:
    """An expression in a script is put there as text: whoever names a branch would write it."""
    script = "\n".join(step["run"] for step in job["steps"] if "run" in step)
    assert not EXPRESSION.search(script)
    command = [tool("shellcheck"), "--shell=bash", "--exclude=SC2312", "-"]
    done = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("job", JOBS)
def test_workflows_start_existing_targets(job: dict[str, Any]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for step in job["steps"]:
        for words in re.findall(r"^make (.+)$", step.get("run", ""), flags=re.MULTILINE):
            assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in words.split())
        for path in re.findall(r"(?:deploy|\.ci)/[\w./-]+", step.get("run", "")):
            assert (ROOT / path).is_file()
        for name in re.findall(r"\$(?:\{)?(\w+)", step.get("run", "")):
            given = {**job.get("env", {}), **step.get("env", {})}
            assert name in given or name.startswith("GITHUB_") or name in ("PWD", "image"), name
