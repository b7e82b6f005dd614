"""Profile × inventory -> the observations that must exist."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fleet.inventory.ansible import Variables
from fleet.planning.scaling_matrix import study_of
from fleet.yaml_files import read_yaml
from schemas import documents
from schemas.baselines import PlannedBaseline
from schemas.catalogue import BENCHMARKS, Expectation, expand
from schemas.errors import UsageError
from schemas.plans import GPU, Choice, Part, Plan, PlannedHost, Stage
from schemas.stages import GANG, SOAK
from schemas.timeline import STOP_ON
from schemas.waivers import Waiver

LONGEST_SOAK_S = 31 * 86400
PROFILES = Path(__file__).parent / "profiles"


def read_profile(name: str) -> dict[str, Any]:
    """A shipped profile by its name, or the profile in the YAML file of that path.

    Raises:
        UsageError: no such profile, or one with an unknown benchmark or setting; the nearest valid name is given.
    """
    if name.endswith((".yml", ".yaml")):
        path = Path(name)
        if not path.exists():
            raise UsageError(f"profile {name}: no such file: give its whole path, or the name of one that is shipped")
    else:
        shipped = sorted(path.stem for path in PROFILES.glob("*.yml"))
        if name not in shipped:
            raise UsageError(
                f"unknown profile {name}{documents.nearest(name, shipped)}: choose one of {', '.join(shipped)}, "
                "or give the path of a .yml file"
            )
        path = PROFILES / f"{name}.yml"
    profile = read_yaml(path, "profile")
    for stage, content in profile["stages"].items():
        for benchmark, chosen in content["benchmarks"].items():
            _check_settings(f"{path.name}: stage {stage}", benchmark, chosen)
    return {**profile, "name": path.stem}


def _check_settings(where: str, benchmark: str, chosen: Mapping[str, Any]) -> None:
    if benchmark not in BENCHMARKS:
        raise UsageError(
            f"{where}: unknown benchmark {benchmark}{documents.nearest(benchmark, BENCHMARKS)}: "
            f"there are {', '.join(sorted(BENCHMARKS))}"
        )
    defaults = BENCHMARKS[benchmark].settings
    for key, value in chosen.items():
        if key not in defaults:
            raise UsageError(
                f"{where}: benchmark {benchmark} has no setting {key}{documents.nearest(key, defaults)}: "
                f"there are {', '.join(sorted(defaults))}"
            )
        default = defaults[key]
        fits = isinstance(value, float | int) if isinstance(default, float | int) else isinstance(value, type(default))
        if not fits or isinstance(value, bool) or value == []:
            raise UsageError(f"{where}: {benchmark}.{key} is {value!r}, expected something like {default!r}")
        numbers = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int | float)]
        least = 0 if default == 0 else 1 if isinstance(default, int) else None
        if any(number < least if least is not None else not number > 0 for number in numbers):
            wanted = f"at least {least}" if least is not None else "more than 0"
            raise UsageError(f"{where}: {benchmark}.{key} is {value!r}, expected {wanted}")
        choices = BENCHMARKS[benchmark].choices.get(key, default)
        text = value if key in _CLOSED_LISTS else [value] if isinstance(default, str) else []
        unknown = [item for item in text if item not in choices]
        if unknown:
            raise UsageError(
                f"{where}: {benchmark}.{key} has no {unknown[0]}{documents.nearest(str(unknown[0]), choices)}: "
                f"there are {', '.join(choices)}"
            )


_CLOSED_LISTS = frozenset(
    {
        "dtypes",
        "directions",
        "sharings",
        "ops",
        "graph_ops",
        "placements",
        "patterns",
        "workloads",
        "networks",
        "variants",
    }
)
"""Settings that list some of what there is: the catalogue's choices, or else its default."""


def make_plan(
    profile: Mapping[str, Any],
    hosts: Mapping[str, Variables],
    *,
    run_id: str,
    nonce: str,
    created: str,
    manifest: Sequence[Part] = (),
    choice: Choice | None = None,
    waivers: Sequence[Waiver] = (),
    baseline: PlannedBaseline | None = None,
) -> Plan:
    """The plan of one run.

    Args:
        profile: as `read_profile` gives it.
        hosts: as `read_inventory` gives it.
        run_id, nonce: every record of the run must carry both.
        created: UTC time, ISO 8601 with `Z`.
        manifest: what was ordered, as `read_manifest` gives it.
        choice: where `profile` is what of it was chosen: that, and what was not.
        waivers: as `read_waivers` returns them.
        baseline: the accepted records that the run is compared with, as `freeze` leaves them in the run directory.

    Raises:
        UsageError: the inventory lacks what the profile needs; the message names host and variable.
    """
    first = _run_wide(hosts)
    planned = tuple(_host(name, variables, profile) for name, variables in hosts.items())
    stages = tuple(_stage(name, content, first) for name, content in profile["stages"].items())
    plan = Plan(
        run_id=run_id,
        nonce=nonce,
        created=created,
        profile=str(profile["name"]),
        rehearsal=profile["device"] == "cpu",
        criteria=tuple(first.get("rackproof_criteria", ())),
        stages=tuple(stage for stage in stages if stage.name != GANG or any(host.gang for host in planned)),
        hosts=planned,
        expected=(),
        manifest=tuple(manifest),
        grafana_url=str(first.get("rackproof_grafana_url", "")),
        reason=" ".join(str(first.get("rackproof_reason", "")).split()),
        choice=choice,
        waivers=tuple(waivers),
        baseline=baseline,
        study=study_of(profile, first),
    )
    if plan.study:
        return plan  # nothing of it is judged, and a cell may well be of one host
    _check_manifest(plan)
    _check_gangs(plan, int(first.get("rackproof_gang_minimum", 2)))
    return replace(plan, expected=_expected(plan))


_RUN_WIDE = (
    "rackproof_profile",
    "rackproof_manifest",
    "rackproof_grafana_url",
    "rackproof_criteria",
    "rackproof_gang_minimum",
    "rackproof_validation_only",
    "rackproof_epochs",
    "rackproof_batch_size",
    "rackproof_soak_duration",
    "rackproof_soak_stop_on",
    "rackproof_reason",
    "rackproof_budget_s",
    "rackproof_waivers",
    "rackproof_baseline",
)


def _run_wide(hosts: Mapping[str, Variables]) -> Variables:
    """The variables that must be the same on every host, as the first host has them."""
    first_name, first = next(iter(hosts.items()))
    for name, variables in hosts.items():
        for key in _RUN_WIDE:
            if variables.get(key) != first.get(key):
                raise UsageError(
                    f"{key} is {first.get(key)!r} on host {first_name} and {variables.get(key)!r} on host {name}: "
                    "it holds for the whole run; set it on the group gpu_hosts"
                )
    return first


def _host(name: str, variables: Variables, profile: Mapping[str, Any]) -> PlannedHost:
    rack = str(variables.get("rackproof_rack", "unassigned"))
    has_gang = GANG in profile["stages"]
    chosen = "all" if profile.get("study") else variables.get("rackproof_gang", "rack")
    gang = {"rack": rack, "all": "all", "none": ""}[chosen] if has_gang else ""
    return PlannedHost(
        name=name,
        address=str(variables.get("rackproof_fabric_address", variables.get("ansible_host", name))),
        rack=rack,
        device=profile["device"],
        devices=_devices(name, variables, profile),
        gpu_model=str(variables.get("rackproof_gpu_model", "")),
        gang=gang,
        fabric_gbps=float(variables.get("rackproof_fabric_gbps", 0)),
        environment=dict(variables.get("rackproof_environment", {})),
        share_gpus=bool(variables.get("rackproof_share_gpus", False)),
    )


def _devices(name: str, variables: Variables, profile: Mapping[str, Any]) -> tuple[int, ...]:
    if profile["device"] == "cpu":
        return tuple(range(profile["processes_per_host"]))
    count, chosen = variables.get("rackproof_gpu_count"), variables.get("rackproof_gpu_devices")
    if count is None:
        raise UsageError(
            f"host {name}: rackproof_gpu_count is missing: state how many GPUs the host was ordered with "
            "(what is found cannot prove what should be there)"
        )
    if chosen is not None and len(chosen) != count:
        raise UsageError(
            f"host {name}: rackproof_gpu_devices lists {len(chosen)} GPUs, rackproof_gpu_count says {count}"
        )
    return tuple(chosen) if chosen is not None else tuple(range(count))


def _stage(name: str, content: Mapping[str, Any], variables: Variables) -> Stage:
    """The profile's stage with the operator's choices for training laid over it."""
    chosen = {
        "epochs": variables.get("rackproof_epochs"),
        "batch_size": variables.get("rackproof_batch_size"),
    }
    over = {key: value for key, value in chosen.items() if value is not None}
    benchmarks = {
        benchmark: {**settings, **(over if "epochs" in BENCHMARKS[benchmark].settings else {})}
        for benchmark, settings in content["benchmarks"].items()
        if not (BENCHMARKS[benchmark].trains and variables.get("rackproof_validation_only", False))
    }
    return Stage(
        name=name,
        deadline_s=float(content["deadline_s"]),
        collective_timeout_s=float(content["collective_timeout_s"]),
        benchmarks=benchmarks,
        **(_soak(content, variables) if name == SOAK else {}),
    )


def _soak(content: Mapping[str, Any], variables: Variables) -> dict[str, Any]:
    """How long it goes round, and what ends it."""
    chosen = variables.get("rackproof_soak_duration")
    duration_s = float(content["duration_s"]) if chosen is None else seconds(str(chosen))
    if not 0 < duration_s <= LONGEST_SOAK_S:
        raise UsageError(
            f"rackproof_soak_duration {chosen}: give more than nothing, and {LONGEST_SOAK_S // 86400} d at most"
        )
    return {"duration_s": duration_s, "stop_on": str(variables.get("rackproof_soak_stop_on", STOP_ON[0]))}


def seconds(text: str) -> float:
    """`24h`, `45m`, `1h30m`, `90s`, `2d` in seconds. Raises UsageError where it is no such time."""
    if not text or not re.fullmatch(r"(\d+d)?(\d+h)?(\d+m)?(\d+s)?", text):
        raise UsageError(f"rackproof_soak_duration {text!r}: write a time such as 24h, 45m, 1h30m or 2d")
    units = {"d": 86400, "h": 3600, "m": 60, "s": 1}
    return float(sum(int(count) * units[unit] for count, unit in re.findall(r"(\d+)([dhms])", text)))


def _check_manifest(plan: Plan) -> None:
    """Raise UsageError if the manifest and the inventory were not ordered together."""
    listed = Counter(part.host for part in plan.manifest if part.kind == GPU)
    for host in plan.hosts if listed and not plan.rehearsal else ():
        if listed[host.name] != len(host.devices):
            raise UsageError(
                f"host {host.name}: the manifest lists {listed[host.name]} GPUs, rackproof_gpu_count says "
                f"{len(host.devices)}: correct one of them"
            )


def _check_gangs(plan: Plan, minimum: int) -> None:
    for gang, members in plan.gangs().items():
        if len(members) < max(minimum, 2):
            raise UsageError(
                f"gang {gang} has {len(members)} host ({', '.join(members)}) where {max(minimum, 2)} are needed: "
                "set rackproof_gang to `all` to launch across racks, or to `none` to leave the multi-host stage out"
            )


def _expected(plan: Plan) -> tuple[Expectation, ...]:
    device = "cpu" if plan.rehearsal else "gpu"
    return tuple(
        expectation
        for stage in plan.stages
        for benchmark, settings in stage.benchmarks.items()
        for expectation in expand(stage.name, benchmark, settings, device)
    )
