"""Ansible callback plugin: records the events of a Rackproof run in its run directory.

If no host is left to run the last play, the plugin writes the report itself.

`events.jsonl` has each failed or unreachable host, with task and message, and the hosts that completed each play. The report
needs these events, and Ansible itself does not keep them.
`progress.jsonl` has the start of each play and task, and the outcome of each task on each host, for `rackproof watch`. An error
while `progress.jsonl` is written never ends the playbook.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ansible import context
from ansible.parsing.splitter import parse_kv
from ansible.plugins.callback import CallbackBase
from ansible.release import __version__

DOCUMENTATION = """
    name: rackproof_events
    type: aggregate
    short_description: records the events of a Rackproof run
    description:
      - Writes failed, unreachable and completed hosts to C(events.jsonl) in the run directory, for the report.
      - Writes the start of each play and task, and the outcome of each task on each host, to C(progress.jsonl) in the run
        directory, for C(rackproof watch). Not in check mode.
      - After the preflight checks, warns if several hosts of the inventory are the same machine. Not in a rehearsal.
      - Prints the progress of the hosts on standard error while a task waits for a stage of the run. Not in check mode.
      - Prints how to resume and how to stop the run if ansible-playbook exits before the playbook has finished, for example after
        Ctrl-C.
      - Writes the report if no host is left to run the last play.
      - Stops the run's Prometheus at the end of the run.
      - Ends ansible-playbook with exit code 64 if C(--limit), C(--tags), C(--skip-tags) or the inventory selects no task of a
        playbook of Rackproof, if C(-e) has words that Ansible assigns to no variable, if ansible-core is too old, or if the
        strategy of Ansible runs a task for each host that must run once.
    requirements:
      - the playbooks of Rackproof, which set the fact C(_rackproof_run_dir)
    options:
      heartbeat:
        description: Minimum number of seconds between two progress lines. 0 means no progress lines.
        type: float
        default: 30
        ini:
          - {section: callback_rackproof_events, key: heartbeat}
        env:
          - {name: RACKPROOF_HEARTBEAT}
"""

RUN_DIR, TARGETS_FILE = "_rackproof_run_dir", "_rackproof_targets_file"
"""Facts with the paths of the run directory (set by the role `plan`) and of the Prometheus targets (by `monitoring`)."""
REHEARSAL = "_rackproof_rehearsal"
"""Fact that the role `plan` sets: whether the run is a rehearsal, in which several hosts may be the same machine."""
PREFLIGHT = "_rackproof_preflight"
"""Variable of the role `preflight` with the output of its probe, which has the boot ID of the host."""
MAX_NAMES = 8
SET_FACT = ("set_fact", "ansible.builtin.set_fact", "ansible.legacy.set_fact")
WAITS_FOR = "_rackproof_waits_for"
"""Task variable: the stage that the task waits for."""
LAST_COMMAND = "_rackproof_last_command"
"""Variable of the play that ends a run. Its value is the verb of `rackproof` that the play runs: `report` or `scaling`.

If this play starts no task because no host is left, the plugin runs the verb. All of these must be true:

- ansible-playbook is not in check mode.
- `--tags` is absent or has `all`.
- `--skip-tags` does not skip this play.
- The playbook has a play with the tag `run`, and `--skip-tags` does not skip that play.
"""
MAX_BUFFERED = 100_000
MAX_LINE_BYTES = 2000
NO_ERRNO = 257
"""`rc` of `ansible.builtin.command` if the program was not started and there is no errno."""
USAGE = 64
"""Exit code if options or inventory select no task, if `-e` has words that belong to no variable, or if the version or strategy
of Ansible is not supported."""
WITHOUT_RUN_ONCE = ("free", "host_pinned")
"""Strategies of Ansible that run a task with `run_once` for each host. Each host would make a plan and a report of its own."""
MIN_ANSIBLE = (2, 19)
"""The oldest supported ansible-core, as in pyproject.toml. This plugin reads attributes of results that older versions lack."""
TAGS = ("install", "configure", "run", "report")
"""The tags of the plays, without `always`. tests/unit/roles/test_roles.py checks that plays have no other tags."""
LEASED = 75
"""Exit code of the agent if the host is leased to another run."""
ROOT = Path(__file__).parents[2]

Json = dict[str, Any]


class EventLog:
    """A JSON Lines file in the run directory. Events are buffered until the directory is known."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._file = -1
        self._buffer: list[Json] = []

    def open(self, directory: Path) -> None:
        """Open the file, and write the buffered events. If a killed process left an incomplete last line, end that line first."""
        path = directory / self._name
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        self._file = os.open(path, flags, 0o644)
        if _is_unterminated(path):
            os.write(self._file, b"\n")
        buffered, self._buffer = self._buffer, []
        for event in buffered:
            self._append(event)

    def write(self, event: Json) -> None:
        """Add the time to the event, and write it."""
        event = {"at": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ"), **event}
        if self._file >= 0:
            self._append(event)
        elif len(self._buffer) < MAX_BUFFERED:
            self._buffer.append(event)

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _append(self, event: Json) -> None:
        os.write(self._file, (json.dumps(event) + "\n").encode())


def never_raise(method: Callable[..., None]) -> Callable[..., None]:
    """Decorate a method of `ProgressWriter`: an exception becomes a warning, after which the writer does nothing more."""

    @functools.wraps(method)
    def guarded(self: ProgressWriter, *arguments: Any) -> None:
        if self.is_disabled:
            return
        try:
            method(self, *arguments)
        except Exception as error:  # noqa: BLE001 - an error here must not end the playbook
            self.is_disabled = True
            with contextlib.suppress(Exception):
                self.warn(f"progress is no longer recorded: {type(error).__name__}: {error}")
            with contextlib.suppress(Exception):
                self.stop_heartbeat()

    return guarded


class ProgressWriter:
    """Writes `progress.jsonl`, and prints progress lines from a thread. `open`, `write` and `close` never raise."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self.is_disabled = bool(context.CLIARGS.get("check"))
        self.warn = warn
        self._log = EventLog("progress.jsonl")
        self._heartbeat: HeartbeatThread | None = None

    @never_raise
    def open(self, directory: Path, heartbeat_s: float, display: Callable[[str], None]) -> None:
        """Open the file, write the buffered events, and start to print progress lines unless `heartbeat_s` is 0."""
        self._log.open(directory)
        if heartbeat_s > 0:
            self._heartbeat = HeartbeatThread(directory, heartbeat_s, display)

    @never_raise
    def write(self, event: Json) -> None:
        """Write one event."""
        self._log.write(event)

    @never_raise
    def close(self) -> None:
        """Write the last event, stop the thread of the progress lines, and close the file."""
        self._log.write({"what": "end"})
        self.stop_heartbeat()
        self._log.close()

    def stop_heartbeat(self) -> None:
        """Stop the thread that prints progress lines, if there is one."""
        heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat:
            heartbeat.stop()


class CallbackModule(CallbackBase):  # type: ignore[misc]
    """Receives the events from Ansible."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "rackproof_events"

    def __init__(self) -> None:
        super().__init__()
        self._failures = EventLog("events.jsonl")
        self._progress = ProgressWriter(self._display.warning)
        self._directory: Path | None = None
        self._targets: Path | None = None
        self._machines: dict[str, set[str]] = {}
        """Boot ID -> hosts that reported it to the preflight checks."""
        self._is_rehearsal = False
        self._play_name = ""
        self._play_command = self._last_command = ""
        self._passed_hosts: set[str] = set()
        self._failed_hosts: set[str] = set()
        self._ends_run = self._is_run_play = False
        self._is_ours = self._has_run = self._has_run_tagged = self._has_failed = False
        self._hint = ""

    def v2_playbook_on_start(self, playbook: Any) -> None:
        """Record the start of a playbook, and set the verb (LAST_COMMAND) that must run at its end even if all hosts fail.

        Exit if Ansible is too old, if its strategy has no `run_once`, or if `-e` has words that Ansible assigns to no variable.
        """
        ours = [play for play in playbook.get_plays() if _is_in_playbooks(play.get_path().rpartition(":")[0])]
        self._is_ours |= bool(ours) or _is_in_playbooks(playbook._file_name)
        if self._is_ours and tuple(map(int, __version__.split(".")[:2])) < MIN_ANSIBLE:
            self._display.error(
                f"ansible-core {__version__} of {sys.executable} is too old for Rackproof, which needs "
                f"{'.'.join(map(str, MIN_ANSIBLE))} or newer: activate the virtual environment (source .venv/bin/activate), "
                "or install the newer one (docs/accept.md)"
            )
            sys.exit(USAGE)
        strategy = next((str(play.strategy) for play in ours), "")
        if strategy.rpartition(".")[2].removeprefix("mitogen_") in WITHOUT_RUN_ONCE:
            self._display.error(
                f"Rackproof cannot run with Ansible's strategy {strategy}: all hosts of a run must do each task together, and "
                "some tasks must run once for all hosts. Set the environment variable ANSIBLE_STRATEGY=linear, or remove "
                "`strategy` from ansible.cfg"
            )
            sys.exit(USAGE)
        if self._is_ours and (words := _unassigned_words()):
            self._display.error(
                f"-e assigns `{words}` to no variable, and Ansible would continue without these words. -e takes NAME=VALUE, not "
                "`NAME: VALUE` or `NAME = VALUE`. Quote a value that has spaces a second time, as in "
                '-e "rackproof_site=\'Oslo, hall 2\'", or write JSON: -e \'{"rackproof_site": "Oslo, hall 2"}\''
            )
            sys.exit(USAGE)
        if self._directory is not None:  # ansible-playbook was given several playbooks, and this is not the first
            self._open_logs(self._directory)
        self._progress.write({"what": "start", "playbook": Path(playbook._file_name).name[:200], "pid": os.getpid()})
        skipped = set(context.CLIARGS.get("skip_tags") or ())
        plays = [play for play in playbook.get_plays() if not skipped & _labels(play)]
        is_complete = not context.CLIARGS.get("check") and "all" in (context.CLIARGS.get("tags") or ("all",))
        if is_complete and any("run" in play.tags for play in plays):
            self._last_command = next(filter(None, (play.get_vars().get(LAST_COMMAND) for play in plays)), "")
        self._ends_run = bool(self._last_command)

    def v2_playbook_on_play_start(self, play: Any) -> None:
        """Record the hosts that completed the previous play, and the start of the new play.

        `rackproof watch` derives the stage of the new play from its roles and its name.
        """
        # Without this, the garbage collector of each forked worker would visit all objects of this process.
        gc.freeze()
        self._finish_play()
        self._play_name = play.get_name().strip()[:200]
        self._play_command = play.get_vars().get(LAST_COMMAND, "")
        self._is_run_play = "run" in play.tags
        roles = [role.get_name() for role in play.get_roles()]
        self._progress.write({"what": "play", "play": self._play_name, "roles": roles})

    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:
        """Record the task, with the stage that it waits for."""
        if self._play_command:
            # A host is left, so this play runs the verb itself. Without hosts, Ansible starts plays but no tasks.
            self._last_command = ""
        stage = task.get_vars().get(WAITS_FOR, "")
        self._progress.write(
            {"what": "task", "task": task.get_name().strip()[:200], **({"stage": stage} if stage else {})}
        )

    def v2_playbook_on_handler_task_start(self, task: Any) -> None:
        """Record the handler."""
        self._progress.write({"what": "task", "task": task.get_name().strip()[:200]})

    def v2_runner_on_start(self, host: Any, task: Any) -> None:
        """Record that a host started the task."""
        self._has_run = True
        self._has_run_tagged |= "always" not in task.tags
        if not task.run_once:
            self._progress.write({"what": "began", "host": host.get_name()})
        if self._is_run_play and self._directory is not None and not self._hint:
            self._hint = _interruption_hint(self._directory.name)
            atexit.register(self._show_hint, os.getpid())

    def v2_runner_on_ok(self, result: Any) -> None:
        """Record that a host completed the task. Read the facts of the run."""
        host = result.host.get_name()
        self._passed_hosts.add(host)
        if result.task.action in SET_FACT:  # not from other actions: a hostile host may return such facts
            self._read_facts(result.result.get("ansible_facts") or {})
        if result.task.register == PREFLIGHT and (boot := _boot_id(result.result.get("stdout"))):
            self._machines.setdefault(boot, set()).add(host)
        if not result.task.run_once:
            rc = result.result.get("rc")
            is_wait = bool(result.task.get_vars().get(WAITS_FOR)) and isinstance(rc, int)
            self._progress.write({"what": "ok", "host": host, **({"rc": rc} if is_wait else {})})

    def v2_runner_on_skipped(self, result: Any) -> None:
        """Record that a host skipped the task."""
        self._passed_hosts.add(result.host.get_name())
        if not result.task.run_once:
            self._progress.write({"what": "skipped", "host": result.host.get_name()})

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        """Record a failure of the host, or of the control node if the task has `run_once`."""
        if not ignore_errors:
            self._has_failed = True
            self._record_failure(result, "failed")
        if not result.task.run_once:
            self._progress.write({"what": "ok" if ignore_errors else "failed", "host": result.host.get_name()})
        elif not ignore_errors:
            self._progress.write({"what": "failed"})

    def v2_runner_on_unreachable(self, result: Any) -> None:
        """Record that a host is unreachable. The host then leaves the run, unless the task has `ignore_unreachable`."""
        if not result.task.ignore_unreachable:
            self._record_failure(result, "unreachable")
        self._progress.write({"what": "unreachable", "host": result.host.get_name()})

    def _show_hint(self, pid: int) -> None:
        """Show how to resume or stop the run if this process exits before the playbook has finished.

        `atexit` calls this method, because Ansible calls no method of a callback after Ctrl-C. `pid`: the process that
        registered it; in forked workers the method does nothing.
        """
        if self._hint and os.getpid() == pid:
            self._display.display(self._hint, stderr=True)

    def v2_playbook_on_stats(self, stats: Any) -> None:
        """End the run. If no host was left to start the last play, run its verb (LAST_COMMAND), for example `report`, here."""
        self._hint = ""
        atexit.unregister(self._show_hint)
        self._finish_play()
        self._progress.close()
        if self._directory is not None and self._last_command:
            command = [sys.executable, str(ROOT / "rackproof"), self._last_command, str(self._directory)]
            completed = subprocess.run(command, capture_output=True, text=True, check=False)
            self._display.display(completed.stdout + completed.stderr)
        if self._directory is not None and self._ends_run:
            self._stop_monitoring(self._directory)
        self._failures.close()
        if self._is_ours and (reason := self._reason_without_tasks()):
            self._display.error(reason)
            sys.exit(USAGE)  # otherwise Ansible would exit with 0

    def _reason_without_tasks(self) -> str:
        """Return why nothing was done, and the remedy; empty if tasks ran.

        With `--tags` or `--skip-tags`, tasks with the tag `always` do not count as tasks that ran. If one of them failed,
        the result is empty, because Ansible has already reported the error.
        """
        chosen = sorted(
            {*(context.CLIARGS.get("tags") or ())} - {"all"}
        )  # sorted, because Ansible keeps the tags as a set
        skipped = sorted(context.CLIARGS.get("skip_tags") or ())
        given = {"--limit": context.CLIARGS.get("subset"), "--tags": ",".join(chosen), "--skip-tags": ",".join(skipped)}
        options = " ".join(f"{option} {value}" for option, value in given.items() if value)
        if not self._has_run:
            within = f" with {options}" if options else ""
            return f"nothing was done: no task ran on a host of the group gpu_hosts{within}: correct the inventory or the options"
        if (chosen or skipped) and not self._has_run_tagged and not self._has_failed:
            return f"nothing was done: {options} selects no task of this playbook: the tags are {', '.join(TAGS)}"
        return ""

    def _warn_of_shared_machines(self) -> None:
        """Warn once for each machine that has several names in the inventory, unless the run is a rehearsal."""
        for hosts in filter(lambda hosts: len(hosts) > 1 and not self._is_rehearsal, self._machines.values()):
            names = sorted(hosts)
            more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
            self._display.warning(
                f"{', '.join(names[:MAX_NAMES])}{more} are the same machine (they have the same boot ID): if they are measured "
                "at the same time, healthy parts look slow; keep only one of them in the inventory"
            )
        self._machines.clear()

    def _read_facts(self, facts: Json) -> None:
        self._is_rehearsal |= facts.get(REHEARSAL) is True
        if facts.get(RUN_DIR) and self._directory is None:
            self._directory = Path(facts[RUN_DIR]).absolute()
            self._open_logs(self._directory)
        if facts.get(TARGETS_FILE):
            self._targets = Path(facts[TARGETS_FILE]).absolute()
            self._progress.write({"what": "targets", "path": str(self._targets)})

    def _open_logs(self, directory: Path) -> None:
        heartbeat_s = float(self.get_option("heartbeat") or 0)
        self._progress.open(directory, heartbeat_s, functools.partial(self._display.display, stderr=True))
        self._failures.open(directory)

    def _finish_play(self) -> None:
        """Record the hosts that completed the play.

        The report then ignores the failures of these hosts in earlier attempts at the same play.
        """
        self._warn_of_shared_machines()
        if passed := sorted(self._passed_hosts - self._failed_hosts):
            self._failures.write({"play": self._play_name, "what": "passed", "hosts": passed})
        self._passed_hosts, self._failed_hosts = set(), set()

    def _record_failure(self, result: Any, what: str) -> None:
        if result.task.run_once:
            return  # a task of the control node, not of this host
        host, outcome = result.host.get_name(), result.result
        self._failed_hosts.add(host)
        task = result.task.name or result.task.get_name()  # `get_name` puts the role before the name
        event = {"play": self._play_name, "what": what, "host": host, "task": task[:200]}
        if outcome.get("rc") == LEASED and "rackproof" in str(outcome.get("cmd")):
            event["in_use"] = True
        self._failures.write({**event, "message": _message_of(outcome)})

    def _stop_monitoring(self, directory: Path) -> None:
        """Remove the targets and stop the run's Prometheus. (If a host is left, the role `monitoring` does the same.)"""
        if self._targets is not None:
            self._targets.unlink(missing_ok=True)
        if (directory / "metrics" / "prometheus.pid").exists():
            program = ROOT / "roles" / "monitoring" / "files" / "prometheus.py"
            subprocess.run([sys.executable, str(program), "stop", str(directory / "metrics")], check=False)


def _is_in_playbooks(file: str) -> bool:
    """Return whether the file is a playbook of Rackproof."""
    return Path(file).resolve().parent == ROOT / "playbooks"


def _labels(play: Any) -> set[str]:
    """Return the values of `--skip-tags` that skip the play: its tags, `all`, and `tagged` (`untagged` if it has no tags)."""
    return {*play.tags, "tagged" if play.tags else "untagged", "all"}


def _unassigned_words() -> str:
    """Return the words of `-e` that Ansible assigns to no variable, for example `hall 2` of `rackproof_site=Oslo, hall 2`."""
    texts = [str(text) for text in context.CLIARGS.get("extra_vars") or ()]
    assigned = [parse_kv(text) for text in texts if not text.startswith(("@", "[", "{"))]
    return next((str(values["_raw_params"]) for values in assigned if "_raw_params" in values), "")


def _interruption_hint(run_id: str) -> str:
    """Return how to resume and how to stop the run."""
    playbook = os.path.relpath(ROOT / "playbooks" / "stop.yml")
    inventories = [word for inventory in context.CLIARGS.get("inventory") or () for word in ("-i", str(inventory))]
    stop = shlex.join(["ansible-playbook", *inventories, playbook, "-e", f"rackproof_run_id={run_id}"])
    return (
        "interrupted: stages that were started continue on the hosts. To resume the run, repeat the command with "
        f"-e rackproof_run_id={run_id}. To stop its stages: {stop}"
    )


def _boot_id(output: Any) -> str:
    """Return the boot ID in the output of the preflight checks; empty if there is none. A hostile host may print anything."""
    try:
        facts = json.loads(output)
    except (TypeError, ValueError, RecursionError):
        return ""
    boot = facts.get("boot_id") if isinstance(facts, dict) else None
    return boot if isinstance(boot, str) else ""


def _message_of(outcome: Json) -> str:
    """Return the error message of a task on one line."""
    message = next(filter(None, map(outcome.get, ("stderr", "module_stderr", "stdout", "msg"))), "")
    program, code = str(outcome.get("cmd") or "").split()[:1], outcome.get("rc")
    if message == "Error executing command." and program and isinstance(code, int) and 0 < code < NO_ERRNO:
        message = f"{program[0]}: {os.strerror(code)}"  # the program could not be started; rc is the errno
    lines = str(message).encode(errors="replace").decode().splitlines()
    # pip prints a warning for each attempt to reach an index, before the error that matters.
    errors = [line for line in lines if not line.startswith("WARNING: ")]
    return " ".join(" ".join(errors if any(map(str.strip, errors)) else lines).split())[:1000] or "no message"


def _is_unterminated(path: Path) -> bool:
    """Return whether the file is not empty and does not end with a newline."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read(1) not in (b"", b"\n")


class HeartbeatThread(threading.Thread):
    """Displays the lines of `rackproof watch`, which runs in a separate process, so that its errors cannot affect Ansible.

    Ansible forks for every task, and a lock that this thread holds at the fork would stay locked in the forked process. So the
    thread must hold no lock while it waits for a line. The pipe is unbuffered, because a read from a buffered pipe holds a lock.
    """

    def __init__(self, directory: Path, every_s: float, display: Callable[[str], None]) -> None:
        super().__init__(name="rackproof_heartbeat", daemon=True)
        self._display = display
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "rackproof"), "watch", str(directory), f"--beats={every_s:g}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self.start()

    def run(self) -> None:
        """Display each line until the process ends."""
        rest = b""
        with contextlib.suppress(Exception):
            while part := os.read(self._process.stdout.fileno(), 65536):  # type: ignore[union-attr]
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    self._display(line[:MAX_LINE_BYTES].decode("utf-8", "replace"))

    def stop(self) -> None:
        """End the process and the thread."""
        self._process.terminate()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(2)
        self.join(2)
