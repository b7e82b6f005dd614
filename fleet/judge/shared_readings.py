"""Find the criteria whose readings are equal on all hosts of a layout, so that their verdicts are computed only once.

The hosts of a layout are those whose benchmark observations differ only in their values (`fleet.judge.layout`). A reading is a
value that a collector reads on a host. Its token is a number: two readings with equal tokens are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Generic, TypeVar

from fleet.judge.layout import HostValues, values_at

Step = TypeVar("Step")


class SharedReadings(Generic[Step]):
    """The steps of the judge whose readings are equal on all hosts of a layout that were judged so far. A step is, for example, a
    criterion."""

    def __init__(self, values: HostValues, names: Mapping[Step, tuple[str, ...]]) -> None:
        """Begin with each step whose readings all have a token on the first host.

        Args:
            values: the values of the first host.
            names: step -> names of its readings.
        """
        self.steps = {step: of_step for step, of_step in names.items() if values.readings_key(of_step) is not None}
        self._places = values.places
        self._tokens = {name: values.readings_key([name]) or () for of_step in self.steps.values() for name in of_step}
        self._select()

    def _select(self) -> None:
        """Prepare `remove_changed`: `_expected` has the tokens of the readings of the remaining steps.

        `_chosen` selects the tokens of the same readings of another host.
        """
        used = {name for of_step in self.steps.values() for name in of_step}
        self._tokens = {name: tokens for name, tokens in self._tokens.items() if name in used}
        self._chosen = values_at(list(chain.from_iterable(map(self._places.__getitem__, self._tokens))))
        self._expected = tuple(chain.from_iterable(self._tokens.values()))

    def remove_changed(self, values: HostValues) -> list[Step]:
        """Remove the steps whose readings on this host differ from those on the hosts judged before, and return these steps."""
        if values.places is self._places and self._chosen(values.tokens) == self._expected:
            return []
        changed = {name for name, expected in self._tokens.items() if values.readings_key([name]) != expected}
        return self.remove([step for step, names in self.steps.items() if not changed.isdisjoint(names)])

    def remove(self, steps: list[Step]) -> list[Step]:
        """Remove these steps, and return them."""
        for step in steps:
            del self.steps[step]
        if steps:
            self._select()
        return steps
