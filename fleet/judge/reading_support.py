"""Check that a GPU has the optional readings that most GPUs of its kind have.

An optional criterion skips a part that does not support its reading. Whether a reading is supported depends on the GPU model, the
driver and the hypervisor. A GPU that lacks a reading that GPUs of the same kind have is faulty, or its host hides the value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from fleet.judge.host_view import HostView
from schemas.records import UNSUPPORTED
from schemas.reports import Verdict
from schemas.scopes import Scope

Kind = tuple[str, str, bool, int]
"""GPU model, driver version, whether the host is a virtual machine, and number of GPUs."""
Key = tuple[Kind, str, str]
"""Kind of a GPU, reading, and its scope below the GPU, such as `link=3`."""
NVLINK, ACTIVE_LINKS = "gpu.nvlink.", "gpu.nvlink.active_links"
"""Readings that a GPU without an NVLink bridge may lack, and the number of links by which such a GPU is known."""


class ReadingSupport:
    """The number of GPUs that have, and that lack, each optional reading. Those of different hosts can be merged in any order."""

    def __init__(self) -> None:
        self._supported: Counter[Key] = Counter()
        self._unsupported: Counter[Key] = Counter()

    def add(self, view: HostView) -> None:
        """Count the readings of a host."""
        for key, _, reason in _last_readings(view):
            (self._unsupported if reason else self._supported)[key] += 1

    def update(self, other: ReadingSupport) -> None:
        """Add the counts of other hosts."""
        self._supported.update(other._supported)
        self._unsupported.update(other._unsupported)

    def judge(self, view: HostView) -> Iterator[Verdict]:
        """Yield an inconclusive verdict for each reading that a GPU does not support and at least half of its kind do."""
        for key, scope, reason in _last_readings(view):
            supported, total = self._supported[key], self._supported[key] + self._unsupported[key]
            if reason and supported and 2 * supported >= total:
                text = f"{reason}; {supported} of {total} GPUs of this model with the same driver have this reading"
                yield view.inconclusive(key[1], scope, text, kind=UNSUPPORTED)


def _last_readings(view: HostView) -> Iterator[tuple[Key, str, str]]:
    """Yield each optional reading of the GPUs under test in the last snapshot that has it: key, scope, and why it is unsupported.

    The reason is empty if there is a value. Readings that failed with an error are left out.
    """
    planned = {*view.host.scopes} if view.host.device == "gpu" else set()
    linked = {scope for scope, links in view.observations.last_values(ACTIVE_LINKS).items() if links}
    driver = str(view.observations.last_values("driver.version").get("host", ""))
    is_virtual = view.observations.last_values("host.virtual_machine").get("host") is True
    for name in _optional_names(view) if planned else ():
        gpus = planned & linked if name.startswith(NVLINK) else planned
        _, metric = view.observations.metrics[name][-1]
        reasons = {scope: why for scope, why in metric.absent.items() if why.partition(":")[0] == UNSUPPORTED}
        for scope, reason in (*dict.fromkeys(metric.values, "").items(), *reasons.items()):
            parsed = Scope.parse(scope)
            if parsed.device in gpus:
                kind = view.names.get(parsed.device, ""), driver, is_virtual, len(planned)
                yield (kind, name, parsed.below), scope, reason


def _optional_names(view: HostView) -> set[str]:
    """Return the readings of GPUs that only optional criteria compare with a limit; other criteria require their reading."""
    criteria = [
        item
        for item in view.criteria().values()
        if item.same_as_fleet is None and item.baseline is None and item.optional
    ]
    return {
        name for item in criteria if item.name.startswith("gpu.") for name in item.matched(view.observations.metrics)
    }
