"""The hosts that measure a shared directory together."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agent.benchmarks.runtime.host_exchange import HostExchange
from agent.benchmarks.storage.child import run_children
from agent.benchmarks.storage.directory import PREFIX
from agent.benchmarks.storage.target import ACCESS_S, Target, clean, program_answer, run_directory_program

if TYPE_CHECKING:
    from agent.benchmarks.runtime.rank_context import RankContext

STEP_S = 30.0
"""Seconds that a host waits for the other hosts in a step, in addition to the time limit of the step's child processes."""
MOST_LOOKED_UP = 16
"""Maximum number of hosts whose subdirectories each host looks up, to check whether all hosts have the same file system."""
_WORK = re.compile(rf"{PREFIX}\w{{1,32}}")


class ExcludedError(Exception):
    """This host must not continue; the message says why. The message is empty if `Target.problem` has the reason."""


class Clients:
    """The hosts that still take part, and the values that they exchange.

    Args:
        context: the context of this rank.
        exchange: carries the values between the hosts.
        target: the shared directory on this host.
    """

    def __init__(self, context: RankContext, exchange: HostExchange, target: Target) -> None:
        self.context, self.target = context, target
        self._exchange = exchange
        self.hosts: tuple[str, ...] = ()
        """The hosts that take part, in the order of the launch."""
        self._works: dict[str, str] = {}
        """Host -> name of its subdirectory for test files."""

    @property
    def host(self) -> str:
        """Return the name of this host."""
        return self._exchange.host

    def join(self) -> None:
        """Find the hosts that can use the directory, and exclude those that have another file system at its path.

        Raises:
            ExcludedError: this host is excluded: it cannot use the directory, has another file system at its path, or answered
                too late.
        """
        # This limit is long: a host may arrive late from the previous benchmark, and a file system may hang at first.
        answers = self._gather("join", {"work": self.target.work.rpartition("/")[2]}, self.context.timeout_s)
        self._works = {
            host: str(answer["work"]) for host, answer in answers.items() if _WORK.fullmatch(str(answer["work"]))
        }
        self.hosts = tuple(host for host in self.hosts if host in self._works)
        looked_up = {self._works[host]: host for host in self.hosts[:MOST_LOOKED_UP]}
        answer = run_directory_program(self.context, {self.target.path: ["see", self.target.path, *looked_up]})[
            self.target.path
        ]
        self.target.problem = answer if isinstance(answer, str) else ""
        seen = [] if isinstance(answer, str) else sorted(map(str, answer["seen"]))
        views = {host: tuple(view["seen"]) for host, view in self.step("look", {"seen": seen}).items()}
        self._leave_out_others(views, [host for work, host in looked_up.items() if work not in seen])

    def _leave_out_others(self, views: Mapping[str, Sequence[str]], invisible: Sequence[str]) -> None:
        """Keep only the hosts with the most common view. The view of a host is the set of subdirectories that it sees.

        If two or more views tie for the most common, leave out all hosts.

        Args:
            views: host -> the subdirectories that it sees.
            invisible: the hosts whose subdirectories this host does not see.
        """
        (view, count), *others = Counter(tuple(view) for view in views.values()).most_common()
        is_unclear = any(number == count for _, number in others)
        same = tuple(host for host in self.hosts if tuple(views[host]) == view and not is_unclear)
        if self.host not in same:
            where = f"{self.target.about.get('filesystem')} {self.target.about.get('device')}".strip()
            different = [host for host in self.hosts if tuple(views[host]) != tuple(views[self.host])]
            self.target.problem = (
                f"the directory does not have the files of {', '.join(invisible[:3])}: on this host it is on "
                f"another file system ({where})"
                if invisible
                else f"the directory has files that {', '.join(different[:3])} cannot see: the hosts do not have the same "
                f"file system here ({where})"
            )
            raise ExcludedError
        self.hosts = same

    def step(self, name: str, value: Mapping[str, Any], limit_s: float = ACCESS_S) -> dict[str, Any]:
        """Exchange the values of a step; return host -> value of the hosts without a problem. Only these hosts continue.

        Args:
            name: name of the step, different for each call.
            value: the value of this host. If its directory has a problem, the other hosts get the problem instead.
            limit_s: time limit of the child processes of this step.

        Raises:
            ExcludedError: the directory has a problem on this host, or this host answered too late.
        """
        return self._gather(name, value, limit_s + STEP_S)

    def _gather(self, name: str, value: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        mine = {"problem": self.target.problem} if self.target.problem else value
        answers = self._exchange.gather(name, mine, limit_s, self.hosts)
        if self.target.problem:
            raise ExcludedError
        if self.host not in answers:
            raise ExcludedError(f"this host answered too late (step {name})")
        good = {
            host: answer for host, answer in answers.items() if isinstance(answer, dict) and "problem" not in answer
        }
        self.hosts = tuple(good)
        return good

    def file_of(self, host: str, name: str) -> str:
        """Return the path of a file in the subdirectory of that host."""
        return f"{self.target.path}/{self._works[host]}/{name}"

    def next_host(self) -> str:
        """Return the host that follows this one, cyclically; this host itself if it is alone."""
        return self.hosts[(self.hosts.index(self.host) + 1) % len(self.hosts)]

    def run(self, commands: Mapping[str, Sequence[str]], limit_s: float) -> dict[str, dict[str, Any]]:
        """Run child programs at the same time; return key -> answer. The first failure becomes the problem of the directory."""
        answers = {}
        for key, ended in run_children(commands, limit_s, self.context.heartbeat.record_progress).items():
            answer = program_answer(ended, limit_s)
            if isinstance(answer, str):
                self.target.problem = self.target.problem or clean(answer)
            else:
                answers[key] = answer
        return answers
