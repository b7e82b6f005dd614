"""A request for one launch of a stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agent.exporter.live import Span
from schemas.plans import Stage


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """One launch of a stage, as the operator or the playbook requests it."""

    stage: Stage
    members: tuple[str, ...]
    """Hosts that start together (a gang), in rank order. A single name means a launch on this host alone."""
    number: int = 0
    """Number of the gang launch, the soak round, or the cell (one measurement) of a scaling study; 0: none."""
    port: int = 0
    """Port of the rendezvous on the first member. The statuses use the next two ports."""
    members_only: bool = False
    """Accept connections to `port` and the next two ports only from the addresses of the members."""
    interface: str = ""
    """Network interface for NCCL and gloo; if it is empty, NCCL and gloo choose."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the operator sets for the ranks."""
    span: Span | None = None
    """Times and progress of the whole soak, if the launch is a round of a soak; else None."""
