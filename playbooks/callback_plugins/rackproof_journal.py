"""Keeps the run's journal: which host failed or went out of reach, where, and why. The report quotes it.

Ansible itself forgets a host once it has left; a fleet report must not. The journal is `events.jsonl` in the run directory.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ansible import context
from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
    name: rackproof_journal
    type: aggregate
    short_description: keeps the journal of a Rackproof run
    description:
      - Writes one JSON line a failed or unreachable host into C(events.jsonl) of the run directory.
    requirements:
      - the playbooks of Rackproof, which set the fact C(_rackproof_run_dir)
"""

RUN_DIR = "_rackproof_run_dir"
ACCEPTING = ("acceptance.yml", "burnin.yml", "revalidate.yml")
"""Playbooks that end with a report."""
HELD = 75
"""The agent's exit code where another run has the host."""
UNKNOWN_ERROR = 257
"""That and more is no errno of a program that could not be started."""


class CallbackModule(CallbackBase):  # type: ignore[misc]
    """Writes to the journal as soon as the run directory is known; what came before is kept until then."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "rackproof_journal"

    def __init__(self) -> None:
        super().__init__()
        self._directory: Path | None = None
        self._waiting: list[dict[str, Any]] = []
        self._play = ""
        self._targets: Path | None = None
        self._measures = self._owes_report = False
        self._passed: set[str] = set()
        self._failed: set[str] = set()

    def v2_playbook_on_start(self, playbook: Any) -> None:
        """An acceptance run owes a report, whatever happens to its plays."""
        name = Path(playbook._file_name).name
        self._owes_report = name in ACCEPTING
        self._measures = name in (*ACCEPTING, "scaling.yml") and not context.CLIARGS.get("check")

    def v2_playbook_on_play_start(self, play: Any) -> None:
        """Notes who came through the play before."""
        gc.freeze()  # a task's fork for each host would look through all that is imported: a seventeenth of the playbook's time
        self._finish_play()
        self._play = play.get_name().strip()

    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:
        """Of a play that no host is left for Ansible tells the beginning, too: who plays the report is told by its first task."""
        self._owes_report = self._owes_report and self._play != "Report"

    def _finish_play(self) -> None:
        """What was said of a host in an earlier attempt at a play is void once the host has come through it."""
        passed = sorted(self._passed - self._failed)
        if passed:
            self._write({"what": "passed", "hosts": passed})
        self._passed, self._failed = set(), set()

    def v2_runner_on_skipped(self, result: Any) -> None:
        """A host that is still there."""
        self._passed.add(result._host.get_name())

    def v2_runner_on_ok(self, result: Any) -> None:
        """A host that is still there. Learns the run directory from the fact that the plan role sets."""
        self._passed.add(result._host.get_name())
        directory = (result._result.get("ansible_facts") or {}).get(RUN_DIR)
        if directory and self._directory is None:
            self._directory = Path(directory)
            waiting, self._waiting = self._waiting, []
            for event in waiting:
                self._append(event)
        path = result._result.get("dest") or result._result.get("path")
        if self._directory is not None and isinstance(path, str) and Path(path).name == f"{self._directory.name}.json":
            self._targets = Path(path) if str(result._task.delegate_to) == "localhost" else self._targets

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        """A host failed a task and leaves the run."""
        if not ignore_errors:
            self._host(result, "failed")

    def v2_runner_on_unreachable(self, result: Any) -> None:
        """A host went out of reach and leaves the run, unless the task can wait for it."""
        if not result.task.ignore_unreachable:
            self._host(result, "unreachable")

    def v2_playbook_on_stats(self, stats: Any) -> None:
        """Where every host has left, Ansible plays nothing more; Prometheus is told, and the report is written, all the same."""
        self._finish_play()
        if self._owes_report and self._directory is not None:
            command = [sys.executable, str(Path(__file__).parents[2] / "rackproof"), "report", str(self._directory)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            self._display.display(done.stdout + done.stderr)
        if self._measures and self._directory is not None:
            self._end_monitoring(self._directory)

    def _end_monitoring(self, directory: Path) -> None:
        """What the role `monitoring` does when it stops, on the control node: a host may be left over for that or not."""
        if self._targets is not None:
            self._targets.unlink(missing_ok=True)
        if (directory / "metrics" / "prometheus.pid").exists():
            program = Path(__file__).parents[2] / "roles" / "monitoring" / "files" / "prometheus.py"
            subprocess.run([sys.executable, str(program), "stop", str(directory / "metrics")], check=False)

    def _host(self, result: Any, what: str) -> None:
        if result._task.run_once:
            return  # a task of the control node, not of this host
        self._failed.add(result._host.get_name())
        outcome = result._result
        said = next(filter(None, map(outcome.get, ("stderr", "module_stderr", "stdout", "msg"))), "")
        program, code = str(outcome.get("cmd") or "").split()[:1], outcome.get("rc")
        if said == "Error executing command." and program and isinstance(code, int) and 0 < code < UNKNOWN_ERROR:
            said = f"{program[0]}: {os.strerror(code)}"  # it could not be started, and rc is why
        in_use = code == HELD and "rackproof" in str(outcome.get("cmd"))
        self._write(
            {
                "what": what,
                **({"in_use": True} if in_use else {}),
                "host": result._host.get_name(),
                "task": result._task.get_name()[:200],
                "message": " ".join(str(said).encode(errors="replace").decode().split())[:1000] or "no message",
            }
        )

    def _write(self, event: dict[str, Any]) -> None:
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        event = {"at": now, "play": self._play[:200], **event}
        if self._directory is None:
            self._waiting.append(event)
        else:
            self._append(event)

    def _append(self, event: dict[str, Any]) -> None:
        assert self._directory is not None  # noqa: S101 - for the type checker
        with (self._directory / "events.jsonl").open("a", encoding="utf-8") as journal:
            journal.write(json.dumps(event) + "\n")
