"""The readings of a layout that are equal on all hosts so far, so that their verdicts are computed only once."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Generic, TypeVar

from fleet.judge.layout import HostValues

Step = TypeVar("Step")


class SharedReadings(Generic[Step]):
    """The steps of the judge, such as criteria, whose readings are equal on all hosts of a layout so far."""

    def __init__(self, values: HostValues, names: Mapping[Step, tuple[str, ...]]) -> None:
        """Share each step of `names` (step -> names of its readings), unless one of its readings has no key on the first host."""
        self.steps = {step: of_step for step, of_step in names.items() if values.readings_key(of_step) is not None}
        self._tokens = {name: values.tokens[name] for names in self.steps.values() for name in names}

    def remove_changed(self, values: HostValues) -> list[Step]:
        """Remove the steps whose readings on this host differ from those of the hosts before it, and return them."""
        tokens = values.tokens
        if all(map(operator.eq, map(tokens.__getitem__, self._tokens), self._tokens.values())):
            return []
        changed = {name for name, expected in self._tokens.items() if tokens[name] != expected}
        return self.remove([step for step, names in self.steps.items() if not changed.isdisjoint(names)])

    def remove(self, steps: list[Step]) -> list[Step]:
        """Remove steps, and return them."""
        for step in steps:
            del self.steps[step]
        used = {name for names in self.steps.values() for name in names}
        self._tokens = {name: tokens for name, tokens in self._tokens.items() if name in used}
        return steps
