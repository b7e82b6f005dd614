"""Make the plan of a run from a profile and an inventory: hosts, stages, and the observations that must exist."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fleet.inventory.ansible import Variables
from fleet.planning.scaling_matrix import study_of
from fleet.planning.stage_times import (
    EXTENDED_DURATION,
    SOAK_DURATION,
    check_scaled_settings,
    duration_s,
    scale_stages,
)
from fleet.planning.storage import local_directories, shared_directories, storage_floors
from fleet.quantities import counted
from fleet.yaml_files import read_yaml
from schemas import documents
from schemas.baselines import PlannedBaseline
from schemas.catalogue import BENCHMARKS, value_problem
from schemas.durations import expected_s, size_of
from schemas.errors import UsageError
from schemas.host_names import check_host_name
from schemas.plans import GPU, BudgetSelection, Part, Plan, PlannedHost, Stage, expectations
from schemas.stages import GANG, SOAK
from schemas.timeline import STOP_ON
from schemas.waivers import Waiver

PROFILES = Path(__file__).parent / "profiles"


def read_profile(name: str) -> dict[str, Any]:
    """Return a shipped profile by its name, or the profile in a YAML file by its path.

    Raises:
        UsageError: the profile does not exist, does not follow profile.schema.json, or has an unknown or invalid benchmark or
            setting. If a valid name is similar to the unknown one, the message suggests it.
    """
    if name.endswith((".yml", ".yaml")):
        path = Path(name)
        if not path.exists():
            raise UsageError(
                f"profile {name}: no such file: give the path of an existing file, or the name of a shipped profile"
            )
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
        for benchmark, profile_settings in content["benchmarks"].items():
            _check_settings(f"{path.name}: stage {stage}", benchmark, profile_settings)
    check_scaled_settings(profile, path.name)
    return {**profile, "name": path.stem}


def _check_settings(where: str, benchmark: str, profile_settings: Mapping[str, Any]) -> None:
    if benchmark not in BENCHMARKS:
        raise UsageError(
            f"{where}: unknown benchmark {benchmark}{documents.nearest(benchmark, BENCHMARKS)}: "
            f"choose from {', '.join(sorted(BENCHMARKS))}"
        )
    defaults = BENCHMARKS[benchmark].settings
    for key, value in profile_settings.items():
        if key not in defaults:
            raise UsageError(
                f"{where}: benchmark {benchmark} has no setting {key}{documents.nearest(key, defaults)}: "
                f"choose from {', '.join(sorted(defaults))}"
            )
        if problem := value_problem(benchmark, key, value):
            raise UsageError(f"{where}: {benchmark}.{key} {problem}")


def without_unused_benchmarks(profile: Mapping[str, Any], hosts: Mapping[str, Variables]) -> dict[str, Any]:
    """Return the profile without the benchmarks that no host of this inventory runs.

    Benchmarks that measure directories are left out if no host has such directories (for example `rackproof_local_storage`).
    Benchmarks that train a model are left out if `rackproof_validation_only` is true. Benchmarks that need an NVLink domain are
    left out if no host has `rackproof_nvlink_domain`. A scaling study (a profile with `study`) is unchanged.
    """
    if profile.get("study"):
        return dict(profile)
    named = {key for variables in hosts.values() for key, value in variables.items() if value}
    validates_only = bool(next(iter(hosts.values())).get("rackproof_validation_only"))

    def is_used(name: str) -> bool:
        benchmark = BENCHMARKS[name]
        return (
            (not benchmark.directories or f"rackproof_{benchmark.directories}" in named)
            and not (benchmark.trains and validates_only)
            and (not benchmark.needs_nvlink_domain or "rackproof_nvlink_domain" in named)
        )

    stages = {
        stage: {
            **content,
            "benchmarks": {name: chosen for name, chosen in content["benchmarks"].items() if is_used(name)},
        }
        for stage, content in profile["stages"].items()
    }
    return {**profile, "stages": stages}


def make_plan(
    profile: Mapping[str, Any],
    hosts: Mapping[str, Variables],
    *,
    run_id: str,
    nonce: str,
    created: str,
    manifest: Sequence[Part] = (),
    choice: BudgetSelection | None = None,
    waivers: Sequence[Waiver] = (),
    baseline: PlannedBaseline | None = None,
    begun_by: str = "",
) -> Plan:
    """Return the plan of one run.

    Args:
        profile: the profile from `read_profile`; with a time budget, the one that `apply_budget` returned.
        hosts: host -> variables, from `read_inventory`.
        run_id, nonce: identify the run; every record of the run repeats them.
        created: when the plan was made: UTC, ISO 8601 with `Z`.
        manifest: the operator's list of parts and cables, from `read_manifest`.
        choice: which tests were selected and skipped because of a time budget; None if the whole profile runs.
        waivers: the waivers from `read_waivers`.
        baseline: directory of the baseline and digest of its copy, from `planned_baseline`; None: without a baseline.
        begun_by: the playbook or LOCAL_RUN (`Plan.begun_by`).

    Raises:
        UsageError: the inventory lacks what the profile needs, or contradicts itself, the manifest or the profile.
    """
    profile, run_variables = without_unused_benchmarks(profile, hosts), _run_wide_variables(hosts)
    planned, stages = _hosts_and_stages(profile, hosts)
    plan = Plan(
        run_id=run_id,
        nonce=nonce,
        created=created,
        profile=str(profile["name"]),
        rehearsal=profile["device"] == "cpu",
        criteria=tuple(run_variables.get("rackproof_criteria", ())),
        stages=stages,
        hosts=planned,
        expected=(),
        manifest=tuple(manifest),
        grafana_url=str(run_variables.get("rackproof_grafana_url", "")),
        site=_line(run_variables, "rackproof_site"),
        purchase_order=_line(run_variables, "rackproof_purchase_order"),
        operator=_line(run_variables, "rackproof_operator"),
        reason=_line(run_variables, "rackproof_reason"),
        choice=choice,
        waivers=tuple(waivers),
        baseline=baseline,
        begun_by=begun_by,
        study=study_of(profile, run_variables),
    )
    _check_gang_settings(plan, hosts)
    _check_gang_addresses(plan)
    if plan.study:
        return plan  # a study is not judged, so it has no expectations; its gang may have only one host
    plan = scale_stages(plan, profile, run_variables)
    _check_manifest(plan)
    _check_gangs(plan, int(run_variables.get("rackproof_gang_minimum", 2)))
    return replace(plan, expected=expectations(plan.stages, rehearsal=plan.rehearsal))


def expected_costs(profile: Mapping[str, Any], hosts: Mapping[str, Variables]) -> dict[tuple[str, str], float]:
    """Return (stage, benchmark) -> expected seconds on the host on which the benchmark takes the longest.

    Settings and sizes are those of the plan. As in the plan, the stage `gang` is left out if no host is in a gang.

    Raises:
        UsageError: a variable of the inventory is invalid, or differs between hosts that must agree on it.
    """
    planned, stages = _hosts_and_stages(profile, hosts)
    plan = Plan(
        run_id="",
        nonce="",
        created="",
        profile="",
        rehearsal=False,
        criteria=(),
        expected=(),
        stages=stages,
        hosts=planned,
    )
    return {
        (stage.name, name): max(expected_s(name, chosen, size_of(plan, host, stage.name)) for host in planned)
        for stage in stages
        for name, chosen in stage.benchmarks.items()
    }


def _hosts_and_stages(
    profile: Mapping[str, Any], hosts: Mapping[str, Variables]
) -> tuple[tuple[PlannedHost, ...], tuple[Stage, ...]]:
    """Return the planned hosts, and the stages of the profile, without the stage `gang` if no host is in a gang."""
    run_variables = _run_wide_variables(hosts)
    planned = tuple(_planned_host(name, variables, profile) for name, variables in hosts.items())
    stages = (_planned_stage(name, content, run_variables) for name, content in profile["stages"].items())
    return planned, tuple(stage for stage in stages if stage.name != GANG or any(host.gang for host in planned))


def _line(variables: Variables, name: str) -> str:
    """Return the text of a variable, with line breaks replaced by spaces; empty if the variable is not set."""
    return " ".join(str(variables.get(name, "")).split())


RUN_WIDE_VARIABLES = (
    "rackproof_site",
    "rackproof_purchase_order",
    "rackproof_operator",
    "rackproof_profile",
    "rackproof_manifest",
    "rackproof_grafana_url",
    "rackproof_criteria",
    "rackproof_gang_minimum",
    "rackproof_validation_only",
    "rackproof_epochs",
    "rackproof_batch_size",
    SOAK_DURATION,
    EXTENDED_DURATION,
    "rackproof_soak_stop_on",
    "rackproof_reason",
    "rackproof_budget_s",
    "rackproof_waivers",
    "rackproof_baseline",
    "rackproof_shared_storage",
)


def _run_wide_variables(hosts: Mapping[str, Variables]) -> Variables:
    """Return the variables of the first host. Raise UsageError if another host differs in a run-wide variable."""
    first_name, first = next(iter(hosts.items()))
    for name, variables in hosts.items():
        for key in RUN_WIDE_VARIABLES:
            if variables.get(key) != first.get(key):
                raise UsageError(
                    f"{key} is {first.get(key)!r} on host {first_name} and {variables.get(key)!r} on host {name}: "
                    "it must be the same for the whole run; set it on the group gpu_hosts"
                )
    return first


def _planned_host(name: str, variables: Variables, profile: Mapping[str, Any]) -> PlannedHost:
    rack = str(variables.get("rackproof_rack", "unassigned"))
    has_gang = GANG in profile["stages"]
    gang_setting = "all" if profile.get("study") else variables.get("rackproof_gang", "rack")
    gang = {"rack": rack, "all": "all", "none": ""}[gang_setting] if has_gang else ""
    return PlannedHost(
        name=name,
        address=str(variables.get("rackproof_fabric_address", variables.get("ansible_host", name))),
        rack=rack,
        device=profile["device"],
        devices=_devices(name, variables, profile),
        gpu_model=str(variables.get("rackproof_gpu_model", "")),
        gang=gang,
        nvlink_domain=str(variables.get("rackproof_nvlink_domain", "")),
        fabric_gbps=float(variables.get("rackproof_fabric_gbps", 0)),
        infiniband_ports=int(variables.get("rackproof_infiniband_ports", 0)),
        verbs_required=bool(variables.get("rackproof_verbs_required", False)),
        dimm_count=int(variables.get("rackproof_dimm_count", 0)),
        memory_mts=float(variables.get("rackproof_memory_mts", 0)),
        local_storage=local_directories(name, variables),
        shared_storage=shared_directories(name, variables, has_gang=has_gang),
        storage_floors=storage_floors(variables),
        host_memory_gbyteps=float(variables.get("rackproof_host_memory_gbyteps", 0)),
        driver_version=_driver_version(variables),
        vbios_version=str(variables.get("rackproof_vbios_version", "")),
        environment=dict(variables.get("rackproof_environment", {})),
        share_gpus=bool(variables.get("rackproof_share_gpus", False)),
        bmc=bool(variables.get("rackproof_bmc_address")) and not profile.get("study"),
    )


def _driver_version(variables: Variables) -> str:
    """Return the driver version that the inventory requires; empty if it requires none, or if the driver is not checked."""
    is_ignored = variables.get("nvidia_driver_state") == "ignored"
    return "" if is_ignored else str(variables.get("nvidia_driver_version") or "")


def _devices(name: str, variables: Variables, profile: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the indexes of the GPUs under test; in a rehearsal, those of the processes that replace GPUs."""
    if profile["device"] == "cpu":
        return tuple(range(profile["processes_per_host"]))
    count, devices = variables.get("rackproof_gpu_count"), variables.get("rackproof_gpu_devices")
    if count is None:
        raise UsageError(
            f"host {name}: rackproof_gpu_count is missing: state how many GPUs the host was ordered with "
            "(the number of detected GPUs does not show how many are missing)"
        )
    if devices is not None and len(devices) != count:
        raise UsageError(
            f"host {name}: rackproof_gpu_devices lists {counted(len(devices), 'GPU')}, but rackproof_gpu_count is {count}"
        )
    return tuple(devices) if devices is not None else tuple(range(count))


def _planned_stage(name: str, content: Mapping[str, Any], variables: Variables) -> Stage:
    """Return a stage of the profile, with the epochs and the batch size of the inventory in the benchmarks that have them."""
    training = {
        "epochs": variables.get("rackproof_epochs"),
        "batch_size": variables.get("rackproof_batch_size"),
    }
    overrides = {key: value for key, value in training.items() if value is not None}
    benchmarks = {
        benchmark: {**settings, **(overrides if "epochs" in BENCHMARKS[benchmark].settings else {})}
        for benchmark, settings in content["benchmarks"].items()
    }
    return Stage(
        name=name,
        deadline_s=float(content["deadline_s"]),
        collective_timeout_s=float(content["collective_timeout_s"]),
        benchmarks=benchmarks,
        **(_soak_settings(content, variables) if name == SOAK else {}),
    )


def _soak_settings(content: Mapping[str, Any], variables: Variables) -> dict[str, Any]:
    """Return the fields of `Stage` that only a soak has: its duration in seconds, and which findings end it early."""
    return {
        "duration_s": duration_s(variables, SOAK_DURATION, float(content["duration_s"])),
        "stop_on": str(variables.get("rackproof_soak_stop_on", STOP_ON[0])),
    }


def _check_manifest(plan: Plan) -> None:
    """Raise UsageError if the number of a host's GPUs differs between the manifest and the inventory.

    A manifest without GPUs is not checked, nor is a rehearsal.
    """
    listed = Counter(part.host for part in plan.manifest if part.kind == GPU)
    for host in plan.hosts if listed and not plan.rehearsal else ():
        if listed[host.name] != len(host.devices):
            raise UsageError(
                f"host {host.name}: the manifest lists {counted(listed[host.name], 'GPU')}, but rackproof_gpu_count is "
                f"{len(host.devices)}: correct one of them"
            )


RENDEZVOUS_PORT = 29500
"""Default of `rackproof_rendezvous_port`."""
GANG_WIDE_ENVIRONMENT = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_NET", "NCCL_IB_DISABLE")
"""Environment variables that decide how two ranks exchange data. If ranks have different values, NCCL hangs or fails."""


def _gang_settings(variables: Variables) -> dict[str, object]:
    """Return setting -> value, for the settings that must be the same on all hosts of a gang."""
    environment = variables.get("rackproof_environment") or {}
    return {
        "rackproof_rendezvous_port": variables.get("rackproof_rendezvous_port", RENDEZVOUS_PORT),
        **{f"{name} in rackproof_environment": environment.get(name, "not set") for name in GANG_WIDE_ENVIRONMENT},
    }


def _check_gang_settings(plan: Plan, hosts: Mapping[str, Variables]) -> None:
    """Raise UsageError if hosts of a gang differ in a setting that must be the same. Such a host could not join the launch."""
    for gang, members in plan.gangs().items():
        settings = {member: _gang_settings(hosts[member]) for member in members}
        for name in settings[members[0]]:
            values = {member: str(of_member[name]) for member, of_member in settings.items()}
            ((usual, _),) = Counter(values.values()).most_common(1)
            for member, value in values.items():
                if value != usual:
                    other = next(host for host in members if values[host] == usual)
                    raise UsageError(
                        f"gang {gang}: {name} is {value} on host {member}, and {usual} on host {other}: all hosts of a gang "
                        "need the same value; set it on the group"
                    )


def _check_gang_addresses(plan: Plan) -> None:
    """Raise UsageError if the address of a host in a gang is not a valid host name or IP address."""
    for member in (member for members in plan.gangs().values() for member in members):
        address = plan.host(member).address
        try:
            check_host_name(address)
        except OSError as error:
            raise UsageError(
                f"host {member}: address {address!r} is {error.strerror}; correct ansible_host or rackproof_fabric_address"
            ) from None


def _check_gangs(plan: Plan, minimum: int) -> None:
    """Raise UsageError if a gang has fewer hosts than `minimum`, or fewer than two."""
    for gang, members in plan.gangs().items():
        needed = max(minimum, 2)
        if len(members) < needed:
            hosts = "host" if len(members) == 1 else "hosts"
            raise UsageError(
                f"gang {gang} has {len(members)} {hosts} ({', '.join(members)}), {needed} are needed: "
                "set rackproof_gang to `all` to launch across racks, or to `none` to leave the multi-host stage out"
            )
