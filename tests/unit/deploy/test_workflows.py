"""The workflows in .github match GitHub's schema and are safe, and their commands exist. The tests do not need GitHub."""

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
    """Return the path of a program that pip installed."""
    return str(Path(sys.executable).parent / name)


def read(path: Path) -> dict[str, Any]:
    workflow: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return workflow


JOBS = [pytest.param(job, id=f"{path.stem}-{name}") for path in WORKFLOWS for name, job in read(path)["jobs"].items()]


def test_workflows_are_valid_by_the_github_schema() -> None:
    command = [tool("check-jsonschema"), "--builtin-schema", "vendor.github-workflows", *WORKFLOWS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_only_the_job_publish_has_more_than_read_permission(path: Path) -> None:
    assert read(path)["permissions"] == {"contents": "read"}
    jobs_with_more = {name for name, job in read(path)["jobs"].items() if job.get("permissions", {}) != {}}
    assert jobs_with_more <= {"publish"}


def test_image_is_published_only_for_a_tag_and_after_the_gpu_tests() -> None:
    job = read(ROOT / ".github/workflows/image.yml")["jobs"]["publish"]
    assert job["permissions"] == {"contents": "read", "packages": "write"}
    assert job["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert set(job["needs"]) == {"rehearse", "gpu"}
    names = [step.get("name") for step in job["steps"]]
    assert names.index("Run an acceptance test of this machine with the image") < names.index("Push the image")


@pytest.mark.parametrize("job", JOBS)
def test_actions_are_pinned_to_a_commit_and_checkout_does_not_store_the_token(job: dict[str, Any]) -> None:
    used = [step for step in job["steps"] if "uses" in step]
    assert all(PINNED.fullmatch(step["uses"]) for step in used)
    checkouts = [step for step in used if step["uses"].startswith("actions/checkout@")]
    assert checkouts
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_each_action_has_one_version() -> None:
    lines = [line.split("uses: ")[1] for path in WORKFLOWS for line in path.read_text().splitlines() if "uses:" in line]
    assert all(re.search(r" # v\d+\.\d+\.\d+$", line) for line in lines)
    assert len(set(lines)) == len({line.partition("@")[0] for line in lines})


@pytest.mark.parametrize("job", JOBS)
def test_self_hosted_runner_runs_no_code_of_pull_requests(job: dict[str, Any]) -> None:
    if "self-hosted" in job["runs-on"]:
        assert "github.event_name != 'pull_request'" in job["if"] or "refs/tags/" in job["if"]


@pytest.mark.parametrize("job", JOBS)
def test_scripts_pass_shellcheck_and_contain_no_expression(job: dict[str, Any]) -> None:
    """GitHub inserts the value of an expression into the script, so a value such as the name of a branch could inject code."""
    script = "\n".join(step["run"] for step in job["steps"] if "run" in step)
    assert not EXPRESSION.search(script)
    command = [tool("shellcheck"), "--shell=bash", "--exclude=SC2312", "-"]
    done = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("job", JOBS)
def test_workflows_use_existing_make_targets_scripts_and_variables(job: dict[str, Any]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for step in job["steps"]:
        for words in re.findall(r"^make (.+)$", step.get("run", ""), flags=re.MULTILINE):
            assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in words.split())
        for path in re.findall(r"(?:deploy|\.ci)/[\w./-]+", step.get("run", "")):
            assert (ROOT / path).is_file()
        for name in re.findall(r"\$(?:\{)?(\w+)", step.get("run", "")):
            given = {**job.get("env", {}), **step.get("env", {})}
            assert name in given or name.startswith("GITHUB_") or name in ("PWD", "image"), name
