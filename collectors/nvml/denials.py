"""Detect denials: NVML reports for a moment that a reading is not supported, although the GPU has it.

On four H200 with driver 580.159.04, NVML returned NVML_ERROR_NOT_SUPPORTED for the error counters of some NVLinks in 2 of about
40 snapshots, and returned the same counters seconds before and after. So "not supported" is accepted only if NVML repeats it, or
if no GPU of the same model has the reading.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from collectors.base import Absent, Family, Labels, Value
from collectors.nvml.links import ACTIVE

_MODEL = "gpu.name"
_PARTS = frozenset({"gpu", "uuid", "link", "peer"})
"""Labels that name a part: the GPU, one of its links, or another GPU. Other labels, such as `reason` of `gpu.throttle.time`,
distinguish readings of the same part."""

_Key = tuple[str, tuple[tuple[str, str], ...]]
"""Name of a reading, and its labels that are not in _PARTS. The key of the state of an NVLink also has the label `link`."""
_Reading = tuple[Labels, Value | Absent]


class Denials:
    """Remembers which readings each model of GPU has, and which of them a GPU denied repeatedly."""

    def __init__(self) -> None:
        self._models: dict[_Key, set[Value | Absent | None]] = {}
        """Reading -> the models of GPU that had it."""
        self._accepted: set[tuple[str, _Key]] = set()
        """Pairs of a GPU and a reading that this GPU denied repeatedly. `find` no longer returns the GPU for this reading."""

    def find(self, families: Iterable[Family]) -> set[int]:
        """Return the NVML indices of GPUs that deny a reading which a GPU of the same model has now or had earlier.

        A GPU whose model cannot be read is compared with the GPUs of all models. GPUs with an error in any reading, and accepted
        denials, are left out.
        """
        return {int(gpu) for gpu, _ in self._find(families)}

    def accept(self, families: Iterable[Family]) -> None:
        """Accept all denials in these families. `find` then ignores each of them until its reading has a value again."""
        self._accepted |= self._find(families)

    def _find(self, families: Iterable[Family]) -> set[tuple[str, _Key]]:
        listed = list(families)
        models = {
            labels["gpu"]: value for family in listed if family.name == _MODEL for labels, value in family.readings
        }
        denied: set[tuple[str, _Key]] = set()
        measured: set[tuple[str, _Key]] = set()
        failing: set[str] = set()
        for gpu, key, value in _gpu_readings(listed):
            if not isinstance(value, Absent):
                measured.add((gpu, key))
                self._models.setdefault(key, set()).add(models.get(gpu))
            elif value.status == "unsupported":
                denied.add((gpu, key))
            else:
                failing.add(gpu)
        # If NVML denies the links with the highest numbers, `read_link_states` omits them. So a missing link counts as denied.
        links = [key for key in self._models if key[0] == ACTIVE.name]
        denied |= {(gpu, key) for gpu in models for key in links if (gpu, key) not in measured}
        self._accepted -= measured - denied

        def has(gpu: str, key: _Key) -> bool:
            having, model = self._models.get(key, set()), models.get(gpu)
            return model in having or (isinstance(model, Absent) and bool(having))

        # A GPU with an error does not cause another read. Such a read could replace the error, which is evidence, with a value.
        return {(gpu, key) for gpu, key in denied - self._accepted if gpu not in failing and has(gpu, key)}


def replace_denied(families: Iterable[Family], again: Iterable[Family]) -> None:
    """Replace readings in `families` with those in `again`, which were read later.

    A value is a reading that is not absent. The readings of a GPU are replaced if `again` has more values of this GPU and none
    of the earlier readings is an error. The readings of the host are replaced unless `again` has fewer values of the host.
    If the UUID at an index has changed, the earlier readings stay: the driver may have lost a GPU and numbered the others anew.
    """
    older, newer = ({family.name: _by_gpu(family.readings) for family in read} for read in (families, again))
    before, after = _counts(older), _counts(newer)
    uuids = _uuids(older)
    failing = {
        gpu for gpu, _, value in _gpu_readings(families) if isinstance(value, Absent) and value.status == "error"
    }
    known = {uuid for uuid in uuids.values() if uuid}
    better = {
        gpu
        for gpu, uuid in _uuids(newer).items()
        if gpu not in failing
        and after[gpu] > before[gpu]
        and (uuids.get(gpu) == uuid or (not uuids.get(gpu) and uuid not in known))
    }
    if after[None] >= before[None]:
        better.add(None)
    for family in families:
        old, new = older[family.name], newer.get(family.name, {})
        family.readings = [
            reading for gpu in dict.fromkeys([*old, *new]) for reading in (new if gpu in better else old).get(gpu, [])
        ]


def _uuids(families: Mapping[str, Mapping[str | None, list[_Reading]]]) -> dict[str | None, str]:
    """Return the UUID of each GPU; empty if it is unknown."""
    return {
        gpu: readings[0][0].get("uuid", "") for by_gpu in families.values() for gpu, readings in by_gpu.items() if gpu
    }


def _gpu_readings(families: Iterable[Family]) -> Iterator[tuple[str, _Key, Value | Absent]]:
    """Yield the GPU, the key and the value of each reading of a GPU."""
    for family in families:
        excluded = _PARTS - {"link"} if family.name == ACTIVE.name else _PARTS
        for labels, value in family.readings:
            if gpu := labels.get("gpu"):
                yield gpu, (family.name, tuple((k, v) for k, v in labels.items() if k not in excluded)), value


def _by_gpu(readings: Iterable[_Reading]) -> dict[str | None, list[_Reading]]:
    """Return the readings of each GPU. Those of the host have the key None."""
    grouped: dict[str | None, list[_Reading]] = {}
    for labels, value in readings:
        grouped.setdefault(labels.get("gpu"), []).append((labels, value))
    return grouped


def _counts(families: Mapping[str, Mapping[str | None, list[_Reading]]]) -> Counter[str | None]:
    """Return how many values each GPU has. The key None has the number of values of the host."""
    counts: Counter[str | None] = Counter()
    for readings in families.values():
        for gpu, own in readings.items():
            counts[gpu] += sum(not isinstance(value, Absent) for _, value in own)
    return counts
