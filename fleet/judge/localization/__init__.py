"""Find the part that makes a collective slow or fail, from measured pairs of hosts or from the outcomes of launches."""

from __future__ import annotations

from fleet.judge.localization.bisection import Bisection, GroupOutcome, History, ProbeConclusion
from fleet.judge.localization.matrix import Pair, PairKind, Suspect, Tolerance
from fleet.judge.localization.pair_parts import attribute_pair_failures
from fleet.judge.localization.suspects import find_suspects
from fleet.judge.localization.verdicts import judge_gangs

__all__ = [
    "Bisection",
    "GroupOutcome",
    "History",
    "Pair",
    "PairKind",
    "ProbeConclusion",
    "Suspect",
    "Tolerance",
    "attribute_pair_failures",
    "find_suspects",
    "judge_gangs",
]
