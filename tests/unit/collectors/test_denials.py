"""Test denials: NVML reports for a moment that a reading is not supported, although the GPU has it.

The tests check which GPUs are read a second time, and which of their readings are then replaced.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from collectors.base import Absent, Family, Value
from collectors.nvml.denials import Denials, replace_denied

DENIED = Absent.unsupported("NVML: Not Supported")
FAILED = Absent.error("NVML: GPU is lost")
UUIDS = {"0": "GPU-a", "1": "GPU-b", "2": "GPU-c"}


def family(name: str, values: Mapping[str, Value | Absent], uuids: Mapping[str, str] = UUIDS) -> Family:
    """Return a family (the readings of one name).

    Args:
        name: name of the readings.
        values: scope -> value. The scope `1` is GPU 1, `1 7` is link 7 of GPU 1, and the empty scope is the host.
        uuids: GPU -> UUID.
    """
    made = Family(name=name, unit="1", help="")
    for scope, value in values.items():
        gpu, _, link = scope.partition(" ")
        labels = {"gpu": gpu, "uuid": uuids.get(gpu, ""), "link": link}
        made.add({key: text for key, text in labels.items() if text}, value)
    return made


def flat(families: list[Family]) -> dict[str, list[Value | Absent]]:
    """Return name of each family -> its values, in order."""
    return {each.name: [value for _, value in each.readings] for each in families}


NAMES = family("gpu.name", {"0": "H200", "1": "H200", "2": "H100"})
"""The model of each GPU."""


@pytest.mark.parametrize(
    ("readings", "found"),
    [
        ({"0": 1, "1": 1, "2": 1}, set()),
        ({"0": 1, "1": DENIED, "2": 1}, {1}),
        ({"0": 1, "1": 1, "2": DENIED}, set()),  # no other GPU of this model reports the value
        ({"0": 1, "1": FAILED, "2": 1}, set()),
        ({"0": 1, "1 3": DENIED, "1 4": 1, "2": 1}, {1}),
    ],
)
def test_unsupported_reading_counts_as_denied_if_another_gpu_of_the_same_model_has_it(
    readings: dict[str, Value | Absent], found: set[int]
) -> None:
    assert Denials().find([NAMES, family("gpu.thing", readings)]) == found


def test_unsupported_reading_counts_as_denied_if_the_same_gpu_had_it_earlier() -> None:
    denials = Denials()
    assert denials.find([NAMES, family("gpu.thing", {"2": 1})]) == set()
    assert denials.find([NAMES, family("gpu.thing", {"2": DENIED})]) == {2}


def test_denial_of_a_gpu_that_has_an_error_needs_no_second_read() -> None:
    denied = family("gpu.thing", {"0": 1, "1": DENIED})
    failed = family("gpu.other", {"0": 1, "1": FAILED})
    assert Denials().find([NAMES, denied, failed]) == set()


@pytest.mark.parametrize(("state", "found"), [(None, {1}), (DENIED, {1}), (FAILED, set())])
def test_missing_or_unsupported_link_counts_as_denied_if_another_gpu_of_the_same_model_has_it(
    state: Absent | None, found: set[int]
) -> None:
    states: dict[str, Value | Absent] = {"0 0": True, "0 1": True, "1 0": True}
    if state:
        states["1 1"] = state
    assert Denials().find([NAMES, family("gpu.nvlink.active", states)]) == found


def test_accepted_denial_is_ignored_until_the_reading_has_a_value() -> None:
    """The collector accepts a denial if all repeated reads have the denial too."""
    denials = Denials()
    denied, measured = ([NAMES, family("gpu.thing", {"0": 1, "1": value})] for value in (DENIED, 1))
    denials.accept(denied)
    assert denials.find(denied) == set()
    assert denials.find(measured) == set()
    assert denials.find(denied) == {1}


def test_all_readings_of_a_gpu_are_replaced_if_more_of_them_have_values_the_second_time() -> None:
    older = [family("gpu.a", {"0": 1, "1": DENIED}), family("gpu.b", {"0": 1, "1": 4})]
    replace_denied(older, [family("gpu.a", {"0": 9, "1 0": 2, "1 1": 3}), family("gpu.b", {"0": 9, "1": 5})])
    assert flat(older) == {"gpu.a": [1, 2, 3], "gpu.b": [1, 5]}


def test_error_of_a_gpu_is_kept_if_another_gpu_is_read_again() -> None:
    older = [family("gpu.a", {"0": FAILED, "1": DENIED, "2": 1})]
    replace_denied(older, [family("gpu.a", {"0": 5, "1": 7, "2": 1})])
    assert flat(older) == {"gpu.a": [FAILED, 7, 1]}


def test_readings_are_not_replaced_by_those_of_another_gpu_that_now_has_the_same_index() -> None:
    """The driver lost GPU 1 before the GPUs were read a second time, so the GPU that had index 2 now has index 1."""
    older = [family("gpu.a", {"0": 1, "1": DENIED, "2": DENIED})]
    replace_denied(older, [family("gpu.a", {"0": 1, "1": 7}, {"0": "GPU-a", "1": "GPU-c"})])
    assert flat(older) == {"gpu.a": [1, DENIED, DENIED]}


def test_readings_of_a_gpu_without_a_uuid_are_not_replaced_by_those_of_another_gpu() -> None:
    """GPU 1 has no UUID at first. New readings with the UUID `GPU-c` are those of GPU 2."""
    for uuid, expected in (("GPU-b", 2), ("GPU-c", DENIED)):
        older = [family("gpu.a", {"0": 1, "1": DENIED, "2": 1}, {"0": "GPU-a", "2": "GPU-c"})]
        replace_denied(older, [family("gpu.a", {"0": 1, "1": 2}, {"0": "GPU-a", "1": uuid})])
        assert flat(older) == {"gpu.a": [1, expected, 1]}


@pytest.mark.parametrize(("again", "expected"), [(8, 8), (FAILED, 7)])
def test_readings_of_the_host_are_replaced_unless_the_new_ones_have_fewer_values(
    again: Value | Absent, expected: Value
) -> None:
    older = [family("gpu.count", {"": 7})]
    replace_denied(older, [family("gpu.count", {"": again})])
    assert flat(older) == {"gpu.count": [expected]}
