"""Launch a program in place of torchrun, for tests of the supervisor (the process that watches the ranks of a host)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from agent.exporter.live import LivePublisher
from agent.launch.stage import append_outcome, append_start
from agent.launch.supervise import Command, LaunchSpec, supervise
from agent.run.record import HostRun
from schemas.records import Record


def launch_program(
    run: HostRun,
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    ranks: Mapping[int, int],
    gang: str = "",
    report: Callable[[str], None] = lambda line: None,
    channel: Any = None,
    **fields: Any,
) -> Record:
    """Run a program under the supervisor. Like `run_launch`, return the host's record, which has the outcome of the launch.

    `arguments`, `environment` and `ranks` are the fields of Command. `fields` are fields of LaunchSpec; they take precedence over
    those set here.
    """
    spec = LaunchSpec(
        **{
            "stage": "benchmark",
            "host": run.host,
            "members": ("h1",),
            "command": Command(arguments=arguments, environment=environment, ranks=ranks),
            "work": run.directory / "work",
            "deadline_s": 20.0,
            **fields,
        }
    )
    record_start = partial(append_start, run, gang)
    live = partial(
        LivePublisher, run, stage=spec.stage, deadline_s=spec.deadline_s, work=spec.work, ranks=spec.command.ranks
    )
    return append_outcome(
        run, gang, supervise(spec, record_start=record_start, report=report, channel=channel, live=live)
    )
