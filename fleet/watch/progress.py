"""The events of progress.jsonl, one after the other -> where each host is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fleet.watch.tail import moment

PREPARE, INSPECT = "prepare", "inspect"
WAITING, RUNNING, DONE, FAILED, UNREACHABLE = "waiting", "running", "done", "failed", "unreachable"
LEFT, UNKNOWN, NONE = "left", "unknown", "none"
"""Left: earlier, so that it does not come to this stage. None: not planned for this host."""
_JUDGING = ("report.yml", "teardown.yml")
_PREPARING = frozenset({"preflight", "plan", "nvidia_driver", "container_toolkit", "agent", "monitoring"})


@dataclass
class HostStory:
    """One host, as far as the playbook knows."""

    states: dict[str, str] = field(default_factory=dict)
    """Stage -> state, of the stages it came to."""
    since: dict[str, float] = field(default_factory=dict)
    """Stage -> when it took on that state."""
    heard: float = 0.0
    """When something last came from the host; 0: never."""
    left: str = ""
    """Where it left the run: the task."""
    left_in: str = ""
    """And the stage."""
    waits: float = 0.0
    """Since when a stage is waited for that runs on it; 0: none is."""
    before: tuple[str, float] | None = None
    """The state before that, and since when: a host that the wait passes over has it again."""

    def turn(self, stage: str, state: str, at: float) -> None:
        """Takes on a state in a stage."""
        if stage and self.states.get(stage) != state:
            self.states[stage], self.since[stage] = state, at


class Story:
    """What the playbooks of a run have told so far."""

    def __init__(self, stages: Sequence[str], hosts: Iterable[str]) -> None:
        """`stages` are the plan's, in its order."""
        self.stages = (PREPARE, INSPECT, *stages)
        self.hosts = {name: HostStory() for name in hosts}
        self.known = False
        """Whether there was any event."""
        self.attempts = 0
        self.playbook = self.play = self.task = self.stage = self.targets = ""
        self.task_since = 0.0
        self.waiting_for = ""
        """The stage that the task waits for, where it is one that waits."""
        self.pending: dict[str, float] = {}
        """Host -> since when it is at the task."""
        self.answered: set[str] = set()
        """Who is through with the task."""
        self.ended = False
        self.stopped = ""
        """The task on the control node that failed."""
        self._met: set[str] = set()
        self._measured = False

    def feed(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Goes on with these events; one that makes no sense is passed over."""
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
        """What ran when the playbook was cut off: nobody saw how it went on."""
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
        self.pending, self.answered, self._met = {}, set(), set()

    def _stage_of(self, play: str, roles: Sequence[object]) -> str:
        names = [role for role in roles if isinstance(role, str)]
        for name in (*names, play.lower()):
            if name in self.stages[1:]:
                return name
        early = self.playbook not in _JUDGING and not self._measured  # the exporter is stopped again at the end
        return PREPARE if early and _PREPARING & set(names) else ""

    def _finish(self, at: float) -> None:
        """Whoever has come through the stage without leaving."""
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
            host.heard = at
        if waited and self.waiting_for and isinstance(event.get("rc"), int):
            host.turn(self.waiting_for, DONE if event["rc"] == 0 else FAILED, at)

    def _began(self, host: HostStory, name: str, at: float) -> None:
        self.pending[name] = at
        if self.waiting_for:
            host.waits = at
            host.before = (host.states[self.stage], host.since[self.stage]) if self.stage in host.states else None
        if name not in self._met or self.waiting_for or host.left:  # one that had left and goes on was rescued
            host.turn(self.stage, RUNNING, at)
            host.left = host.left_in = ""
        self._met.add(name)


def _text(event: Mapping[str, Any], key: str) -> str:
    found = event.get(key, "")
    return found if isinstance(found, str) else ""


_OF_HOST = ("began", "ok", "skipped", FAILED, UNREACHABLE)
_OF_RUN = {
    "start": Story._start,
    "play": Story._play,
    "task": Story._task,
    "end": Story._end,
    "targets": Story._targets,
}
