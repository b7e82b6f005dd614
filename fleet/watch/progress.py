"""Track where each host is, from the events of progress.jsonl."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fleet.watch.tail import moment

PREPARE, INSPECT = "prepare", "inspect"
WAITING, RUNNING, DONE, FAILED, UNREACHABLE = "waiting", "running", "done", "failed", "unreachable"
LEFT, UNKNOWN, NONE = "left", "unknown", "none"
"""LEFT: the host left the run before this stage. NONE: not planned for this host."""
_JUDGING = ("report.yml", "teardown.yml")
_PREPARING = frozenset({"preflight", "plan", "nvidia_driver", "container_toolkit", "agent", "monitoring"})


@dataclass
class HostProgress:
    """The progress of one host, as the playbook reports it."""

    states: dict[str, str] = field(default_factory=dict)
    """Stage -> state, of the stages it reached."""
    since: dict[str, float] = field(default_factory=dict)
    """Stage -> when it entered that state."""
    last_seen: float = 0.0
    """When the host last answered; 0: never."""
    left: str = ""
    """The task at which it left the run."""
    left_in: str = ""
    """The stage in which it left the run."""
    waits: float = 0.0
    """Since when its running stage is waited for; 0: none is."""
    before: tuple[str, float] | None = None
    """The previous state and its start, restored if the wait skips the host."""

    def turn(self, stage: str, state: str, at: float) -> None:
        """Enter a state in a stage."""
        if stage and self.states.get(stage) != state:
            self.states[stage], self.since[stage] = state, at


class RunProgress:
    """The progress of a run, from the events of its playbooks."""

    def __init__(self, stages: Sequence[str], hosts: Iterable[str]) -> None:
        """Start with the stages of the plan, in order, and its hosts."""
        self.stages = (PREPARE, INSPECT, *stages)
        self.hosts = {name: HostProgress() for name in hosts}
        self.known = False
        """Whether there was an event."""
        self.attempts = 0
        self.playbook = self.play = self.task = self.stage = self.targets = ""
        self.task_since = 0.0
        self.waiting_for = ""
        """The stage that the current task waits for, if any."""
        self.pending: dict[str, float] = {}
        """Host -> since when the task runs on it."""
        self.answered: set[str] = set()
        """Hosts that finished the task."""
        self.ended = False
        self.stopped = ""
        """The task on the control node that failed."""
        self._started_hosts: set[str] = set()
        self._measured = False

    def feed(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Apply events; invalid ones are ignored."""
        for event in events:
            at, what = moment(event.get("at")), event["what"]
            if what in _OF_HOST:
                self._of_host(what, event, at)
            elif what in _OF_RUN:
                self.known = True
                _OF_RUN[what](self, event, at)

    def _start(self, event: Mapping[str, Any], at: float) -> None:
        self._pause(at)
        self.attempts += 1
        self.playbook, self.ended, self.stopped = _text(event, "playbook"), False, ""
        self._measured = False
        for host in self.hosts.values():
            host.left = host.left_in = ""

    def _pause(self, at: float) -> None:
        """Mark running stages as unknown, since the playbook was interrupted."""
        for host in self.hosts.values():
            host.waits = 0.0
            for stage, state in list(host.states.items()):
                if state == RUNNING:
                    host.turn(stage, UNKNOWN, at)
        self.play = self.task = self.stage = self.waiting_for = ""
        self.pending, self.answered = {}, set()

    def _play(self, event: Mapping[str, Any], at: float) -> None:
        roles = event.get("roles")
        if not isinstance(event.get("play"), str):
            return
        stage = self._stage_of(_text(event, "play"), roles if isinstance(roles, list) else [])
        self._measured = self._measured or stage not in ("", PREPARE)
        if stage != self.stage:
            self._finish(at)
        self.play, self.stage, self.task, self.waiting_for = _text(event, "play"), stage, "", ""
        self.pending, self.answered, self._started_hosts = {}, set(), set()

    def _stage_of(self, play: str, roles: Sequence[object]) -> str:
        names = [role for role in roles if isinstance(role, str)]
        for name in (*names, play.lower()):
            if name in self.stages[1:]:
                return name
        early = self.playbook not in _JUDGING and not self._measured  # the exporter is stopped again at the end
        return PREPARE if early and _PREPARING & set(names) else ""

    def _finish(self, at: float) -> None:
        """Mark the stage as done on hosts that are still in it."""
        for host in self.hosts.values():
            if host.states.get(self.stage) == RUNNING:
                host.turn(self.stage, DONE, at)

    def _task(self, event: Mapping[str, Any], at: float) -> None:
        self.task, self.task_since, self.waiting_for = _text(event, "task"), at, _text(event, "stage")
        self.pending, self.answered = {}, set()

    def _end(self, event: Mapping[str, Any], at: float) -> None:
        self._finish(at)
        self._pause(at)
        self.ended = True

    def _targets(self, event: Mapping[str, Any], at: float) -> None:
        self.targets = _text(event, "path")

    def _of_host(self, what: str, event: Mapping[str, Any], at: float) -> None:
        self.known = True
        name = event.get("host", "")
        if name == "" and what == FAILED:
            self.stopped = self.task
        host = self.hosts.get(name) if isinstance(name, str) else None
        if host is None:
            return
        if what == "began":
            self._began(host, name, at)
            return
        self.pending.pop(name, None)
        waited, host.waits = host.waits, 0.0
        if what == "skipped":
            if waited and host.before:
                host.states[self.stage], host.since[self.stage] = host.before
            return
        self.answered.add(name)
        if what in (FAILED, UNREACHABLE):
            host.turn(self.stage, what, at)
            host.left, host.left_in = self.task or self.play, self.stage
        if what != UNREACHABLE:
            host.last_seen = at
        if waited and self.waiting_for and isinstance(event.get("rc"), int):
            host.turn(self.waiting_for, DONE if event["rc"] == 0 else FAILED, at)

    def _began(self, host: HostProgress, name: str, at: float) -> None:
        self.pending[name] = at
        if self.waiting_for:
            host.waits = at
            host.before = (host.states[self.stage], host.since[self.stage]) if self.stage in host.states else None
        if (
            name not in self._started_hosts or self.waiting_for or host.left
        ):  # a host that left and continues was rescued
            host.turn(self.stage, RUNNING, at)
            host.left = host.left_in = ""
        self._started_hosts.add(name)


def _text(event: Mapping[str, Any], key: str) -> str:
    parsed = event.get(key, "")
    return parsed if isinstance(parsed, str) else ""


_OF_HOST = ("began", "ok", "skipped", FAILED, UNREACHABLE)
_OF_RUN = {
    "start": RunProgress._start,
    "play": RunProgress._play,
    "task": RunProgress._task,
    "end": RunProgress._end,
    "targets": RunProgress._targets,
}
