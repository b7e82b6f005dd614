"""Name the culprit behind a slow or failed collective: from the pairs that were measured, or from which launches work."""

from __future__ import annotations

from fleet.judge.localization.bisection import Bisection, Conclusion, History, Outcome
from fleet.judge.localization.matrix import Kind, Pair, Suspect, Tolerance
from fleet.judge.localization.suspects import find_suspects
from fleet.judge.localization.verdicts import judge_pairs

__all__ = [
    "Bisection",
    "Conclusion",
    "History",
    "Kind",
    "Outcome",
    "Pair",
    "Suspect",
    "Tolerance",
    "find_suspects",
    "judge_pairs",
]
