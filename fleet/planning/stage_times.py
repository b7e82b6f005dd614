"""Read the duration of a soak or of a profile such as `extended`. Scale the time budgets of such a profile to its duration.

A time budget is a setting of a benchmark that determines how long it measures, such as `seconds`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fleet.inventory.ansible import Variables
from schemas.catalogue import BENCHMARKS
from schemas.durations import expected_durations, stage_s
from schemas.errors import UsageError
from schemas.plans import Plan, PlannedHost, Stage
from schemas.times import format_span

SOAK_DURATION, EXTENDED_DURATION = "rackproof_soak_duration", "rackproof_extended_duration"
MAX_DURATION_S = 31 * 86400


def duration_s(variables: Variables, name: str, default_s: float) -> float:
    """Return the duration that the inventory variable `name` sets, in seconds; if it is not set, return `default_s`.

    `default_s` is the `duration_s` of the profile.

    Raises:
        UsageError: the duration is invalid, not more than zero, or longer than MAX_DURATION_S.
    """
    text = variables.get(name)
    seconds = default_s if text is None else parse_duration(str(text), name)
    if not 0 < seconds <= MAX_DURATION_S:
        wrong = f"duration_s {default_s:g} of the profile" if text is None else f"{name} {text}"
        raise UsageError(f"{wrong}: give more than 0 and at most {MAX_DURATION_S // 86400} d")
    return seconds


def parse_duration(text: str, name: str = SOAK_DURATION) -> float:
    """Return a duration such as `24h`, `45m`, `1h30m`, `90s` or `2d` in seconds. Raise UsageError if it is invalid."""
    if not text or not re.fullmatch(r"(\d+d)?(\d+h)?(\d+m)?(\d+s)?", text):
        raise UsageError(f"{name} {text!r}: write a duration such as 24h, 45m, 1h30m or 2d")
    units = {"d": 86400, "h": 3600, "m": 60, "s": 1}
    return float(sum(int(count) * units[unit] for count, unit in re.findall(r"(\d+)([dhms])", text)))


def check_scaled_settings(profile: Mapping[str, Any], where: str) -> None:
    """Raise UsageError if `scaled` names a setting that the stage does not set, or that is not a time budget of its benchmark."""
    for stage, content in profile["stages"].items():
        for benchmark, keys in content.get("scaled", {}).items():
            budgets = (
                {key for cost in BENCHMARKS[benchmark].costs for key in cost.timed} if benchmark in BENCHMARKS else ()
            )
            for key in keys:
                if key not in budgets or key not in content["benchmarks"].get(benchmark, {}):
                    raise UsageError(
                        f"{where}: stage {stage} scales {benchmark}.{key}, which is not a time budget that the stage sets: "
                        "remove it from `scaled`, or set it"
                    )


def scale_stages(plan: Plan, profile: Mapping[str, Any], variables: Variables) -> Plan:
    """Scale the time budgets of a plan so that all stages together take the wanted duration.

    The wanted duration is that in EXTENDED_DURATION, or else `duration_s` of the profile. `scaled` in each stage of the profile
    names the time budgets. All of them are multiplied by one factor, and the slowest host decides the factor.

    The profile's deadlines are for `duration_s`. If another duration is wanted, the expected time of a stage changes. The
    deadline of the stage changes by the same number of seconds. The plan of a profile without `duration_s` is unchanged.

    Raises:
        UsageError: the wanted duration is invalid, or too short even for the shortest time budgets; or the profile scales no
            time budget.
    """
    if "duration_s" not in profile:
        return plan
    scaled = {stage: content.get("scaled", {}) for stage, content in profile["stages"].items()}
    hosts = {
        (len(host.devices), host.gang, host.infiniband_ports, host.verbs_required): host for host in plan.hosts
    }.values()
    default_s = float(profile["duration_s"])
    wanted_s = duration_s(variables, EXTENDED_DURATION, default_s)
    least = _least_factor(plan, scaled)
    factor, shortest_s = min((_factor(plan, scaled, host, wanted_s, least) for host in hosts), key=lambda item: item[0])
    if factor < least:
        minutes = int(max(_factor(plan, scaled, host, wanted_s, least)[1] for host in hosts) // 60) + 1
        raise UsageError(
            f"{EXTENDED_DURATION} {format_span(wanted_s)}: the tests of profile {plan.profile} take {format_span(shortest_s)} "
            f"even with the shortest time budgets: give at least {minutes}m"
        )
    default_factor = min(_factor(plan, scaled, host, default_s, least)[0] for host in hosts)
    stages = []
    for stage in plan.stages:
        result = _scaled(stage, scaled[stage.name], factor)
        grown_s = max(
            _stage_s(plan, host, result)
            - _stage_s(plan, host, _scaled(stage, scaled[stage.name], max(default_factor, least)))
            for host in hosts
        )
        stages.append(replace(result, deadline_s=round(stage.deadline_s + grown_s)))
    return replace(plan, stages=tuple(stages))


def _factor(
    plan: Plan, scaled: Mapping[str, Mapping[str, Any]], host: PlannedHost, wanted_s: float, least: float
) -> tuple[float, float]:
    """Return the factor with which the stages of the host take `wanted_s`, and the seconds that they take with `least`."""
    once, twice = (
        sum(_stage_s(plan, host, _scaled(stage, scaled[stage.name], factor)) for stage in plan.stages)
        for factor in (1, 2)
    )
    budgets_s = twice - once  # the duration is linear in the factor
    if budgets_s <= 0:
        raise UsageError(
            f"profile {plan.profile} has a duration_s, but scales no setting: name time budgets in `scaled`"
        )
    return (wanted_s - once) / budgets_s + 1, once + (least - 1) * budgets_s


def _stage_s(plan: Plan, host: PlannedHost, stage: Stage) -> float:
    return stage_s(expected_durations(plan, host, stage))


def _least_factor(plan: Plan, scaled: Mapping[str, Mapping[str, Any]]) -> float:
    """Return the smallest factor with which no time budget is shorter than its default in the catalogue of benchmarks."""
    return max(
        (
            BENCHMARKS[benchmark].settings[key] / stage.benchmarks[benchmark][key]
            for stage in plan.stages
            for benchmark, keys in scaled[stage.name].items()
            if benchmark in stage.benchmarks
            for key in keys
        ),
        default=0.0,
    )


def _scaled(stage: Stage, scaled: Mapping[str, Any], factor: float) -> Stage:
    """Multiply the time budgets in `scaled` by the factor. A budget whose default is an integer stays an integer."""

    def multiplied(benchmark: str, key: str, value: float) -> float:
        is_whole = isinstance(BENCHMARKS[benchmark].settings[key], int)
        return round(value * factor) if is_whole else round(value * factor, 1)

    benchmarks = {
        name: {
            key: multiplied(name, key, value) if key in scaled.get(name, ()) else value for key, value in chosen.items()
        }
        for name, chosen in stage.benchmarks.items()
    }
    return replace(stage, benchmarks=benchmarks)
