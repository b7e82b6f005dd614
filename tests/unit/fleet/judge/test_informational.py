"""INFORMATIONAL states why some readings and figures are not judged. Its entries are found by name and settings."""

from __future__ import annotations

import pytest

from fleet.judge.informational import INFORMATIONAL, reason_of


@pytest.mark.parametrize(
    ("name", "settings", "entry"),
    [
        ("gpu.power", None, "gpu.power"),
        ("gpu.power", {"phase": "before"}, "gpu.power"),
        ("gpu.power_limit", None, ""),
        ("collective.all_reduce.algbw", None, "collective.*.algbw"),
        ("collective.all_reduce.busbw", None, ""),
        ("gpu.throttle.active", None, ""),
        ("gpu.throttle.active", {"reason": "hw_thermal"}, ""),
        ("gpu.throttle.active", {"reason": "power_cap"}, "gpu.throttle.active reason=power_cap"),
        ("gpu.throttle.active", {"reason": "power_cap", "phase": "after"}, "gpu.throttle.active reason=power_cap"),
    ],
)
def test_first_entry_whose_name_and_settings_match_is_used(
    name: str, settings: dict[str, object] | None, entry: str
) -> None:
    assert reason_of(name, settings) == (INFORMATIONAL[entry] if entry else "")
