"""Tells how a run goes on: to `progress.jsonl` in the run directory, which `rackproof watch` shows, and now and then a line here.

Nothing in it can break a playbook: what goes wrong is one warning, and then silence.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ansible import context
from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
    name: rackproof_progress
    type: aggregate
    short_description: tells how a Rackproof run goes on
    description:
      - Writes one JSON line an event into C(progress.jsonl) of the run directory, for C(rackproof watch).
      - While hosts are waited for, tells from time to time how far they are, on standard error. Does nothing in check mode.
    requirements:
      - the playbooks of Rackproof, which set the fact C(_rackproof_run_dir)
    options:
      heartbeat:
        description: Seconds between two lines about a task that goes on; 0 for none.
        type: float
        default: 30
        ini:
          - {section: callback_rackproof_progress, key: heartbeat}
        env:
          - {name: RACKPROOF_HEARTBEAT}
"""

RUN_DIR = "_rackproof_run_dir"
FILE = "progress.jsonl"
MOST_WAITING = 100_000
"""Events that are kept until the run directory is known."""
LINE_BYTES = 2000

Json = dict[str, Any]
Method = Callable[..., None]


def harmless(method: Method) -> Method:
    """Whatever goes wrong ends this plugin, and not the playbook."""

    @functools.wraps(method)
    def guarded(self: CallbackModule, *arguments: Any, **named: Any) -> None:
        if self.given_up:
            return
        try:
            method(self, *arguments, **named)
        except Exception as error:  # noqa: BLE001 - see above
            self.give_up(error)

    return guarded


class CallbackModule(CallbackBase):  # type: ignore[misc]
    """Writes as soon as the run directory is known; what came before is kept until then."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "rackproof_progress"

    def __init__(self) -> None:
        super().__init__()
        self.given_up = bool(context.CLIARGS.get("check"))
        self._directory: Path | None = None
        self._file: int = -1
        self._waiting: list[Json] = []
        self._teller: Teller | None = None

    def give_up(self, error: Exception) -> None:
        """Says so, once."""
        self.given_up = True
        with contextlib.suppress(Exception):
            self._display.warning(f"rackproof_progress: {type(error).__name__}: {error}: no progress is told any more")
        self._stop()

    def _stop(self) -> None:
        teller, self._teller = self._teller, None
        with contextlib.suppress(Exception):
            if teller:
                teller.stop()

    @harmless
    def v2_playbook_on_start(self, playbook: Any) -> None:
        """A new attempt at the run."""
        self._tell({"what": "start", "playbook": Path(playbook._file_name).name[:200], "pid": os.getpid()})

    @harmless
    def v2_playbook_on_play_start(self, play: Any) -> None:
        """A play, with its roles, by which a stage is known."""
        roles = [role.get_name() for role in play.get_roles()]
        self._tell({"what": "play", "play": play.get_name().strip()[:200], "roles": roles})

    @harmless
    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:
        """A task, with the stage whose end it waits for, where it does."""
        stage = waited_for(task)
        self._tell({"what": "task", "task": task.get_name().strip()[:200], **({"stage": stage} if stage else {})})

    @harmless
    def v2_playbook_on_handler_task_start(self, task: Any) -> None:
        """A handler."""
        self._tell({"what": "task", "task": task.get_name().strip()[:200]})

    @harmless
    def v2_runner_on_start(self, host: Any, task: Any) -> None:
        """A host begins with the task."""
        if not task.run_once:
            self._tell({"what": "began", "host": host.get_name()})

    @harmless
    def v2_runner_on_ok(self, result: Any) -> None:
        """A host is through with it. Learns the run directory from the fact that the plan role sets."""
        directory = (result.result.get("ansible_facts") or {}).get(RUN_DIR)
        if directory and self._directory is None:
            self._open(Path(directory))
        if result.task.run_once:
            self._targets(result)
            return
        rc = result.result.get("rc")
        waited = waited_for(result.task) and isinstance(rc, int)
        self._tell({"what": "ok", "host": result.host.get_name(), **({"rc": rc} if waited else {})})

    @harmless
    def v2_runner_on_skipped(self, result: Any) -> None:
        """A host passes it over."""
        if not result.task.run_once:
            self._tell({"what": "skipped", "host": result.host.get_name()})

    @harmless
    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        """A host failed; or, without a host, the control node. Why stands in events.jsonl."""
        if result.task.run_once:
            self._tell({} if ignore_errors else {"what": "failed"})
        else:
            self._tell({"what": "ok" if ignore_errors else "failed", "host": result.host.get_name()})

    @harmless
    def v2_runner_on_unreachable(self, result: Any) -> None:
        """A host went out of reach."""
        self._tell({"what": "unreachable", "host": result.host.get_name()})

    @harmless
    def v2_playbook_on_stats(self, stats: Any) -> None:
        """The playbook has come to its end."""
        self._tell({"what": "end"})
        self._stop()
        if self._file >= 0:
            os.close(self._file)
        self._file, self.given_up = -1, True

    def _targets(self, result: Any) -> None:
        """Where the addresses of the exporters were written, where the operator chose the place."""
        path = result.result.get("dest") or result.result.get("path")
        here = str(result.task.delegate_to) == "localhost" and self._directory is not None
        if here and isinstance(path, str) and Path(path).name == f"{self._directory.name}.json":
            self._tell({"what": "targets", "path": str(Path(path).absolute())})

    def _open(self, directory: Path) -> None:
        self._directory = directory.absolute()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(directory / FILE, flags | os.O_NONBLOCK, 0o644)
        if _torn(directory / FILE):  # an attempt that was killed while it wrote
            os.write(self._file, b"\n")
        waiting, self._waiting = self._waiting, []
        for event in waiting:
            self._write(event)
        every_s = float(self.get_option("heartbeat") or 0)
        if every_s > 0:
            self._teller = Teller(self._directory, every_s, functools.partial(self._display.display, stderr=True))

    def _tell(self, event: Json) -> None:
        if not event:
            return
        event = {"at": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ"), **event}
        if self._file >= 0:
            self._write(event)
        elif len(self._waiting) < MOST_WAITING:
            self._waiting.append(event)

    def _write(self, event: Json) -> None:
        os.write(self._file, (json.dumps(event) + "\n").encode())


def waited_for(task: Any) -> str:
    """The stage for whose end the task waits, by `rackproof wait --stage=…`; else nothing."""
    words = task.args.get("argv") if isinstance(task.args, dict) else None
    told = [str(word) for word in words] if isinstance(words, list) else []
    if "wait" not in told:
        return ""
    return next((word.partition("=")[2][:64] for word in told if word.startswith("--stage=")), "")


def _torn(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read(1) not in (b"", b"\n")


class Teller(threading.Thread):
    """Hands on the lines of `rackproof watch`, a process of its own: whatever it does, Ansible's goes on undisturbed.

    Ansible copies its process for every task, so this thread holds nothing that a copy could wait for: it reads a bare pipe.
    """

    def __init__(self, directory: Path, every_s: float, say: Callable[[str], None]) -> None:
        super().__init__(name="rackproof_progress", daemon=True)
        self._say = say
        command = [sys.executable, str(Path(__file__).parents[2] / "rackproof")]
        self._process = subprocess.Popen(
            [*command, "watch", str(directory), f"--beats={every_s:g}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self.start()

    def run(self) -> None:
        rest = b""
        with contextlib.suppress(Exception):
            while part := os.read(self._process.stdout.fileno(), 65536):  # type: ignore[union-attr]
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    self._say(line[:LINE_BYTES].decode("utf-8", "replace"))

    def stop(self) -> None:
        """Ends it."""
        self._process.terminate()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(2)
        self.join(2)
