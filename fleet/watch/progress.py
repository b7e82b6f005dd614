"""Track the state of each stage on each host, from the events of the playbook in progress.jsonl."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fleet.watch.tail import parse_time

PREPARE, INSPECT = "prepare", "inspect"
"""Stages of the playbook before the stages of the plan."""
WAITING, RUNNING, DONE, FAILED, UNREACHABLE = "waiting", "running", "done", "failed", "unreachable"
LEFT, UNKNOWN, NONE = "left", "unknown", "none"
"""`LEFT`: the host left the run before this stage. `NONE`: the stage is not planned for this host."""
_NOT_PREPARING = ("report.yml", "teardown.yml")
"""Playbooks that have no stage `prepare`, although they may run a role in `_PREPARING`."""
_PREPARING = frozenset({"preflight", "plan", "nvidia_driver", "container_toolkit", "agent", "monitoring"})
"""Roles that belong to the stage `prepare` until the first other stage begins."""


@dataclass
class HostProgress:
    """The progress of one host, as the playbook reports it."""

    states: dict[str, str] = field(default_factory=dict)
    """Stage -> state, for the stages that the host has reached."""
    since: dict[str, float] = field(default_factory=dict)
    """Stage -> when the host entered the state in `states`, in seconds since 1970."""
    last_seen: float = 0.0
    """When a task last finished or failed on the host, in seconds since 1970; 0: never. Skipped tasks do not count."""
    left_task: str = ""
    """The task at which the host failed or became unreachable, and so left the run; empty: the host is in the run."""
    left_stage: str = ""
    """The stage of that task."""
    waiting_since: float = 0.0
    """When the host began a task that waits for a stage (`RunProgress.waiting_for`), in seconds since 1970; 0: no such task is
    running on the host."""
    state_before: tuple[str, float] | None = None
    """State of `RunProgress.stage` on this host before that task, and when the host entered this state. If the host skips the
    task, this state is restored. None: the host had not reached the stage."""

    def set_state(self, stage: str, state: str, at: float) -> None:
        """Set the state of a stage and when the host entered it, unless the stage already has this state."""
        if stage and self.states.get(stage) != state:
            self.states[stage], self.since[stage] = state, at


class RunProgress:
    """The progress of a run, from the events of its playbooks."""

    def __init__(self, stages: Sequence[str], hosts: Iterable[str]) -> None:
        """Start with the stages of the plan, in order, and its hosts."""
        self.stages = (PREPARE, INSPECT, *stages)
        self.hosts = {name: HostProgress() for name in hosts}
        self.has_events = False
        """Whether any event has been applied."""
        self.attempts = 0
        """Number of times that ansible-playbook was started for this run."""
        self.playbook = self.play = self.task = self.stage = ""
        self.targets = ""
        """Path of the file with the addresses of the exporters."""
        self.task_since = 0.0
        self.waiting_for = ""
        """The stage that the current task waits for; empty: none."""
        self.pending: dict[str, float] = {}
        """Host on which the current task is running -> when the task began on the host."""
        self.answered: set[str] = set()
        """Hosts on which the current task finished or failed, or that were unreachable. Hosts that skipped it do not count."""
        self.stopped = ""
        """The task with `run_once` that failed and so stopped the playbook; empty: none."""
        self._started_hosts: set[str] = set()
        self._has_measured = False

    def apply(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Apply events in order. Unknown events and invalid fields are ignored."""
        for event in events:
            at, what = parse_time(event.get("at")), event["what"]
            if what in _HOST_EVENTS:
                self._apply_host_event(what, event, at)
            elif what in _RUN_EVENTS:
                self.has_events = True
                _RUN_EVENTS[what](self, event, at)

    def _start(self, event: Mapping[str, Any], at: float) -> None:
        self._interrupt(at)
        self.attempts += 1
        self.playbook, self.stopped = _string(event, "playbook"), ""
        self._has_measured = False
        for host in self.hosts.values():
            host.left_task = host.left_stage = ""

    def _interrupt(self, at: float) -> None:
        """Set the state of running stages to `unknown`, since the playbook that ran them has ended."""
        for host in self.hosts.values():
            host.waiting_since = 0.0
            for stage, state in list(host.states.items()):
                if state == RUNNING:
                    host.set_state(stage, UNKNOWN, at)
        self.play = self.task = self.stage = self.waiting_for = ""
        self.pending, self.answered = {}, set()

    def _play(self, event: Mapping[str, Any], at: float) -> None:
        roles = event.get("roles")
        if not isinstance(event.get("play"), str):
            return
        stage = self._stage_of(_string(event, "play"), roles if isinstance(roles, list) else [])
        self._has_measured = self._has_measured or stage not in ("", PREPARE)
        if stage != self.stage:
            self._complete_stage(at)
        self.play, self.stage, self.task, self.waiting_for = _string(event, "play"), stage, "", ""
        self.pending, self.answered, self._started_hosts = {}, set(), set()

    def _stage_of(self, play: str, roles: Sequence[object]) -> str:
        """Return the stage to which a play belongs; empty if none."""
        role_names = [role for role in roles if isinstance(role, str)]
        for name in (*role_names, play.lower()):
            if name in self.stages[1:]:
                return name
        # The role `monitoring` runs again after the last stage, to stop the exporters. That is not the stage `prepare`.
        is_early = self.playbook not in _NOT_PREPARING and not self._has_measured
        return PREPARE if is_early and _PREPARING & set(role_names) else ""

    def _complete_stage(self, at: float) -> None:
        """Set the current stage to `done` on the hosts where its state is still `running`."""
        for host in self.hosts.values():
            if host.states.get(self.stage) == RUNNING:
                host.set_state(self.stage, DONE, at)

    def _task(self, event: Mapping[str, Any], at: float) -> None:
        self.task, self.task_since, self.waiting_for = _string(event, "task"), at, _string(event, "stage")
        self.pending, self.answered = {}, set()

    def _end(self, event: Mapping[str, Any], at: float) -> None:
        self._complete_stage(at)
        self._interrupt(at)

    def _targets(self, event: Mapping[str, Any], at: float) -> None:
        self.targets = _string(event, "path")

    def _apply_host_event(self, what: str, event: Mapping[str, Any], at: float) -> None:
        self.has_events = True
        name = event.get("host", "")
        if name == "" and what == FAILED:
            self.stopped = self.task
        host = self.hosts.get(name) if isinstance(name, str) else None
        if host is None:
            return
        if what == "began":
            self._apply_began(host, name, at)
            return
        self.pending.pop(name, None)
        waited_since, host.waiting_since = host.waiting_since, 0.0
        if what == "skipped":
            if waited_since and host.state_before:
                host.states[self.stage], host.since[self.stage] = host.state_before
            return
        self.answered.add(name)
        if what in (FAILED, UNREACHABLE):
            host.set_state(self.stage, what, at)
            host.left_task, host.left_stage = self.task or self.play, self.stage
        if what != UNREACHABLE:
            host.last_seen = at
        if waited_since and self.waiting_for and isinstance(event.get("rc"), int):
            host.set_state(self.waiting_for, DONE if event["rc"] == 0 else FAILED, at)

    def _apply_began(self, host: HostProgress, name: str, at: float) -> None:
        self.pending[name] = at
        if self.waiting_for:
            host.waiting_since = at
            host.state_before = (host.states[self.stage], host.since[self.stage]) if self.stage in host.states else None
        was_rescued = bool(host.left_task)
        if name not in self._started_hosts or self.waiting_for or was_rescued:
            host.set_state(self.stage, RUNNING, at)
            host.left_task = host.left_stage = ""
        self._started_hosts.add(name)


def _string(event: Mapping[str, Any], key: str) -> str:
    value = event.get(key, "")
    return value if isinstance(value, str) else ""


_HOST_EVENTS = ("began", "ok", "skipped", FAILED, UNREACHABLE)
_RUN_EVENTS = {
    "start": RunProgress._start,
    "play": RunProgress._play,
    "task": RunProgress._task,
    "end": RunProgress._end,
    "targets": RunProgress._targets,
}
