"""The pairs of hosts that the benchmark `pairs` measures.

This module does not import torch, so that a rank without torch can report why its pairs are not measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent.benchmarks.runtime.host_rank import read_request
from agent.benchmarks.runtime.rank_context import RankContext
from schemas.tournament import partners


def expected_scopes(context: RankContext, settings: Mapping[str, Any]) -> list[str]:
    """Return the scopes that the plan expects of this rank: one for each host with which this host is paired.

    The pairs come from a round-robin tournament (schemas/tournament.py) of all planned hosts. So a partner may be a host
    that is not in this launch. The list is empty if the launch has fewer than two hosts.
    """
    gang, members = host_names(context)
    if len(members) < 2:
        return []
    return [pair_scope(context, name) for name in partners(gang, members[context.node], settings["rounds"])]


def host_names(context: RankContext) -> tuple[list[str], list[str]]:
    """Return two lists: the hosts that are planned for the multi-node launch, and the hosts that take part in it.

    The second list is in the order of the hosts' ranks. The supervisor writes both lists to `request.json`. Without
    this file they are empty.
    """
    request = read_request(context)
    members = list(request.get("members", []))
    return list(request.get("gang") or members), members


def pair_scope(context: RankContext, other: str) -> str:
    """Return the scope of what this rank's device measures with the host `other`, for example `gpu=3,partner=r12-h02`."""
    return f"{context.device_scope},partner={other}"
