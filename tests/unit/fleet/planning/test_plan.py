"""Test the plans that are made from inventory and profile. Errors name the host, the variable and the nearest valid name."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.launch.torchrun import common_domain
from fleet.inventory.ansible import check_names, check_variables, hosts_of, read_inventory
from fleet.planning.plan import GANG_WIDE_ENVIRONMENT, RENDEZVOUS_PORT, make_plan, read_profile
from schemas import documents
from schemas.errors import UsageError
from schemas.plans import Plan, plan_from_json
from schemas.records import to_json
from tests import ROOT, builders
from tests.accepted import rackproof


def listing(tmp_path: Path, hosts: dict[str, Any]) -> Path:
    """Write an inventory as `ansible-inventory --list` prints it. Return its path."""
    path = tmp_path / "inventory.json"
    path.write_text(json.dumps({"_meta": {"hostvars": hosts}, "gpu_hosts": {"hosts": list(hosts)}}))
    return path


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"rackproof_profil": "smoke"}, "host h1: unknown variable rackproof_profil (did you mean rackproof_profile?)"),
        ({"rackproof_gpu_count": "eight"}, "host h1: rackproof_gpu_count: 'eight' is not a whole number"),
        ({"rackproof_gpu_devices": "[0, 1]"}, "set the variable in YAML: `rackproof_gpu_devices: [a, b]`"),
        ({"rackproof_environment": "A=1"}, "set the variable in YAML: `rackproof_environment: {name: value}`"),
        ({"nvidia_driver_version": 580.1}, 'write it in quotes with all its digits: nvidia_driver_version: "…"'),
        ({"rackproof_share_gpus": "maybe"}, "rackproof_share_gpus: 'maybe' is not true or false"),
        ({"rackproof_gpu_count": None}, "host h1: rackproof_gpu_count: no value: give a whole number"),
        ({"rackproof_gpu_count": True}, "rackproof_gpu_count: True is not a whole number"),
        (
            {"nvidia_driver_verison": "580."},
            "unknown variable nvidia_driver_verison (did you mean nvidia_driver_version?)",
        ),
        (
            {"nvidia_drivers_state": "checked"},
            "unknown variable nvidia_drivers_state (did you mean nvidia_driver_state?)",
        ),
        ({"rackprof_gpu_count": 8}, "unknown variable rackprof_gpu_count (did you mean rackproof_gpu_count?)"),
        ({"Rackproof_rack": "r1"}, "unknown variable Rackproof_rack (did you mean rackproof_rack?)"),
        ({"rackproof_driver_branch": "580"}, "unknown variable rackproof_driver_branch"),
        (
            {"rackproof_gang": "racks"},
            "host h1: rackproof_gang: 'racks' is not one of rack, all, none (did you mean rack?)",
        ),
        ({"nvidia_driver_stat": "checked"}, "unknown variable nvidia_driver_stat (did you mean nvidia_driver_state?)"),
        ({"rackproof_prefix": "relative"}, "rackproof_prefix"),
        (
            {"rackproof_prefix": "{{ here }}/agent"},
            "host h1: rackproof_prefix: '{{ here }}/agent' is a template, which only a playbook evaluates",
        ),
        ({"rackproof_prefix": "{{ here }}", "rackproof_gpu_cuont": 8}, "did you mean rackproof_gpu_count?"),
    ],
)
def test_invalid_variable_is_refused_with_a_message(variables: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_variables({"h1": variables})
    assert message in str(caught.value)


# Variables of other software: NVIDIA's role ansible-role-nvidia-driver, which deepops uses, and others.
OTHER_SOFTWARE = [
    "nvidia_driver_package_state",
    "nvidia_driver_package_version",
    "nvidia_driver_persistence_mode_on",
    "nvidia_driver_skip_reboot",
    "nvidia_driver_module_file",
    "nvidia_driver_module_params",
    "nvidia_driver_add_repos",
    "nvidia_driver_branch",
    "nvidia_driver_ubuntu_install_from_cuda_repo",
    "nvidia_driver_ubuntu_branch",
    "nvidia_driver_ubuntu_packages_suffix",
    "nvidia_driver_ubuntu_cuda_repo_baseurl",
    "nvidia_driver_ubuntu_cuda_repo_gpgkey_url",
    "nvidia_driver_ubuntu_cuda_package",
    "nvidia_driver_rhel_cuda_repo_baseurl",
    "nvidia_driver_rhel_cuda_repo_gpgkey",
    "nvidia_driver_rhel_branch",
    "nvidia_driver_force_install",
    "nvidia_driver_mig_enabled",
    "container_toolkit_image",
    "container_toolkit_enabled",
    "ansible_user",
    "site_name",
]


@pytest.mark.parametrize("name", OTHER_SOFTWARE)
def test_variables_of_other_software_are_ignored(name: str) -> None:
    variables = {name: "{{ whatever }}", "rackproof_rack": "r1"}
    assert check_variables({"h1": variables}) == {"h1": variables}


def test_misspelt_name_without_a_value_is_refused() -> None:
    """A playbook passes the names of all variables, but values only of known ones and of those that begin with `rackproof_`."""
    check_names(["rackproof_rack", "site_name", "groups", "inventory_hostname", *OTHER_SOFTWARE])
    with pytest.raises(UsageError, match=r"unknown variable rackprof_rack \(did you mean rackproof_rack\?\)"):
        check_names(["site_name", "rackprof_rack"])


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        *(("rackproof_system_torch", given, True) for given in ("yes", "on", "True", "true", "1", 1, True)),
        *(("rackproof_take_over", given, False) for given in ("no", "off", "False", "false", "0", 0, False)),
        ("rackproof_gpu_count", "8", 8),
        ("rackproof_exporter_port", " 9836", 9836),
        ("rackproof_fabric_gbps", "400", 400.0),
        ("rackproof_fabric_gbps", "2.5", 2.5),
        ("rackproof_maximum_clock_skew_s", "1e2", 100.0),
        ("rackproof_rack", 12, "12"),
        ("rackproof_run_id", 20261125, "20261125"),
        ("nvidia_driver_version", 580, "580"),
        ("container_toolkit_version", "1.18", "1.18"),
        ("nvidia_driver_serial", "2", "2"),
        ("rackproof_gpu_devices", [0, 1], [0, 1]),
    ],
)
def test_values_have_the_type_of_the_schema(name: str, given: Any, value: Any) -> None:
    ((_, variables),) = check_variables({"h1": {name: given}}).items()
    assert (variables[name], type(variables[name])) == (value, type(value))


def test_ini_inventory_is_read(tmp_path: Path) -> None:
    path = tmp_path / "hosts.ini"
    path.write_text(
        "[gpu_hosts]\nh1 rackproof_gpu_count=8 rackproof_share_gpus=yes rackproof_rack=12\n"
        "[gpu_hosts:vars]\nrackproof_fabric_gbps=400\nnvidia_driver_version=580\nnvidia_driver_branch=580\n"
        "rackproof_validation_only=no\nrackproof_gang=none\n"
    )
    hosts = read_inventory([str(path)])
    plan = make_plan(read_profile("smoke"), hosts, run_id="r", nonce=builders.NONCE, created=builders.WHEN)
    (host,) = plan.hosts
    assert (len(host.devices), host.share_gpus, host.rack, host.fabric_gbps) == (8, True, "12", 400.0)
    assert hosts["h1"]["nvidia_driver_version"] == "580"
    assert hosts["h1"]["rackproof_validation_only"] is False


def test_hosts_of_child_groups_are_listed_in_order() -> None:
    result = hosts_of(
        {
            "_meta": {"hostvars": {"b": {"rackproof_rack": "r2"}}},
            "gpu_hosts": {"children": ["rack1", "rack2"]},
            "rack1": {"hosts": ["a"]},
            "rack2": {"hosts": ["b", "a"]},
        }
    )
    assert result == {"a": {}, "b": {"rackproof_rack": "r2"}}


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"_meta": {}, "gpu_host": {"hosts": ["a"]}}, "no group gpu_hosts (did you mean gpu_host?)"),
        ({"_meta": {}, "gpu_hosts": {"hosts": []}}, "has no hosts"),
    ],
)
def test_inventory_without_hosts_is_refused(result: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        hosts_of(result)
    assert message in str(caught.value)


def test_hostile_host_name_is_refused() -> None:
    with pytest.raises(UsageError, match="a host name may have only letters"):
        check_variables({"../../etc": {}})


def test_run_id_that_is_no_directory_name_is_refused() -> None:
    with pytest.raises(
        UsageError, match="host h1: rackproof_run_id: 'a/b' has the wrong form: write a name of at most 64 "
    ):
        check_variables({"h1": {"rackproof_run_id": "a/b"}})


def test_missing_gpu_count_is_refused() -> None:
    with pytest.raises(UsageError, match="host h1: rackproof_gpu_count is missing"):
        make_plan(read_profile("smoke"), builders.inventory(), run_id="r", nonce=builders.NONCE, created=builders.WHEN)


def test_gpu_count_and_devices_must_agree() -> None:
    with pytest.raises(UsageError, match="rackproof_gpu_devices lists 1 GPU, but rackproof_gpu_count is 2"):
        builders.plan(rackproof_gpu_devices=[0])


def test_rack_with_one_host_cannot_form_a_gang() -> None:
    with pytest.raises(UsageError, match=r"gang r1 has 1 host \(h1\), 2 are needed"):
        builders.plan("h1")
    assert builders.plan("h1", rackproof_gang="none").gangs() == {}


def test_run_wide_variable_must_be_equal_on_all_hosts() -> None:
    hosts = builders.inventory("h1", "h2", rackproof_gpu_count=1)
    hosts["h2"]["rackproof_epochs"] = 3
    with pytest.raises(UsageError, match="rackproof_epochs is None on host h1 and 3 on host h2"):
        make_plan(read_profile("smoke"), hosts, run_id="r", nonce=builders.NONCE, created=builders.WHEN)


def test_default_port_of_the_rendezvous_is_that_of_the_role() -> None:
    defaults = yaml.safe_load((ROOT / "roles" / "common" / "defaults" / "main.yml").read_text())
    assert defaults["rackproof_rendezvous_port"] == RENDEZVOUS_PORT


@pytest.mark.parametrize("profile", ["smoke", "scaling"])
@pytest.mark.parametrize(
    ("variable", "usual", "other", "message"),
    [
        (
            "rackproof_rendezvous_port",
            None,
            29600,
            "rackproof_rendezvous_port is 29600 on host h2, and 29500 on host h1",
        ),
        (
            "rackproof_rendezvous_port",
            29600,
            None,
            "rackproof_rendezvous_port is 29500 on host h2, and 29600 on host h1",
        ),
        (
            "rackproof_rendezvous_port",
            29600,
            29700,
            "rackproof_rendezvous_port is 29700 on host h2, and 29600 on host h1",
        ),
        *(
            (
                "rackproof_environment",
                usual,
                {name: "x"},
                f"{name} in rackproof_environment is x on host h2, and {text} on host h1",
            )
            for name in GANG_WIDE_ENVIRONMENT
            for usual, text in ((None, "not set"), ({name: "y"}, "y"))
        ),
    ],
)
def test_hosts_of_a_gang_need_the_same_value_of_a_setting_of_the_launch(
    profile: str, variable: str, usual: Any, other: Any, message: str
) -> None:
    hosts = builders.inventory("h1", "h2", "h3", rackproof_gpu_count=8, **({variable: usual} if usual else {}))
    hosts["h2"].pop(variable, None)
    hosts["h2"].update({variable: other} if other else {})
    with pytest.raises(UsageError, match=f"gang (r1|all): {message}: .*set it on the group"):
        make_plan(read_profile(profile), hosts, run_id="r", nonce=builders.NONCE, created=builders.WHEN)


def test_settings_of_a_launch_may_differ_between_gangs_and_hosts_without_a_gang() -> None:
    def plan(**variables: Any) -> Plan:
        hosts = builders.inventory("h1", "h2", "h3", "h4", rackproof_gpu_count=8, **variables)
        for name in ("h3", "h4"):
            hosts[name].update(rackproof_rack="r2", rackproof_rendezvous_port=29600)
            hosts[name]["rackproof_environment"] = {"NCCL_PROTO": "Simple"}
        return make_plan(read_profile("smoke"), hosts, run_id="r", nonce=builders.NONCE, created=builders.WHEN)

    assert set(plan().gangs()) == {"r1", "r2"}
    assert plan(rackproof_gang="none").gangs() == {}
    with pytest.raises(UsageError, match="gang all: rackproof_rendezvous_port"):
        plan(rackproof_gang="all")


def test_addresses_and_adapters_may_differ_within_a_gang() -> None:
    hosts = builders.inventory("h1", "h2", rackproof_gpu_count=8)
    hosts["h2"]["rackproof_environment"] = {"NCCL_IB_HCA": "mlx5_4", "NCCL_SOCKET_IFNAME": "eth9"}
    hosts["h2"]["rackproof_fabric_interface"] = "eth9"
    plan = make_plan(read_profile("smoke"), hosts, run_id="r", nonce=builders.NONCE, created=builders.WHEN)
    assert plan.gangs() == {"r1": ("h1", "h2")}


def test_training_variables_reach_the_plan() -> None:
    plan = builders.plan(rackproof_epochs=7, rackproof_batch_size=32)
    assert all(stage.benchmarks["training"] == {"epochs": 7, "batch_size": 32} for stage in plan.stages)
    validation = builders.plan(rackproof_validation_only=True)
    assert not any(item.name.startswith("training.") for item in validation.expected)


def test_host_with_one_gpu_has_collectives_only_in_the_gang_stage() -> None:
    plan = builders.plan(gpu_count=1)
    stages = {item.stage for item in plan.expected_of(plan.hosts[0]) if item.name.startswith("collective.")}
    assert stages == {"gang"}


@pytest.mark.parametrize("profile", ["smoke", "standard", "rehearsal"])
def test_plan_is_valid_and_unchanged_after_writing_and_reading_it(profile: str) -> None:
    plan = builders.plan(profile=profile)
    document = json.loads(json.dumps(to_json(plan)))
    documents.validate(document, "plan", source="plan")
    assert to_json(plan_from_json(document)) == to_json(plan)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("benchmarks: {gem: {}}", "unknown benchmark gem (did you mean gemm or gemm_shapes?)"),
        ("benchmarks: {gemm: {dtype: [bf16]}}", "benchmark gemm has no setting dtype (did you mean dtypes?)"),
        ("benchmarks: {gemm: {dtypes: [bf17]}}", "gemm.dtypes does not accept bf17 (did you mean bf16?)"),
        ("benchmarks: {gemm: {size: big}}", "gemm.size is 'big'"),
        ("benchmarks: {gemm: {size: .nan}}", "not finite"),
        ("benchmarks: {gemm: {size: -5}}", "gemm.size is -5, expected at least 1"),
        ("benchmarks: {training: {epochs: 0}}", "training.epochs is 0, expected at least 1"),
        ("benchmarks: {stress: {seconds: 0.0}}", "stress.seconds is 0.0, expected more than 0"),
        ("benchmarks: {collective: {sizes_bytes: [8, 0]}}", "collective.sizes_bytes is [8, 0], expected at least 1"),
        (
            "benchmarks: {collective: {sizes_bytes: [8, big]}}",
            "collective.sizes_bytes is [8, 'big'], expected a value such as",
        ),
        ("benchmarks: {collective: {sizes_bytes: [1.5]}}", "collective.sizes_bytes is [1.5], expected a value such as"),
        ("benchmarks: {collective: {ops: []}}", "collective.ops is [], expected a value such as"),
        (
            "benchmarks: {digest: {peer_copies: [1]}}",
            "digest.peer_copies is [1], expected a value such as ['round_trip']",
        ),
        ("benchmarks: {stress: {size: 12.5}}", "stress.size is 12.5, expected a value such as 8192"),
        (
            "benchmarks: {verbs: {memories: [gpuu]}}",
            "verbs.memories does not accept gpuu (did you mean gpu?): choose from host, gpu",
        ),
        (
            "benchmarks: {verbs: {figures: ['{x}']}}",
            "verbs.figures does not accept {x}: choose from bandwidth, latency",
        ),
        ("benchmarks: {local_storage: {percentiles: [p95]}}", "local_storage.percentiles does not accept p95"),
        ("benchmarks: {gemm: {}, gemm: {}}", "duplicate key 'gemm'"),
        ("benchmarks: {}", "benchmarks"),
        ("benchmarks: [", "not YAML"),
    ],
)
def test_invalid_profile_is_refused_with_the_name_of_the_setting(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.yml"
    head = (
        "schema: rackproof.profile/1\nsummary: mine\ndevice: gpu\n"
        "stages:\n  benchmark:\n    deadline_s: 1\n    collective_timeout_s: 1\n"
    )
    path.write_text(f"{head}    {text}\n")
    with pytest.raises(UsageError) as caught:
        read_profile(str(path))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("variables", "arguments", "message"),
    [
        ({"rackproof_profile": "smok"}, [], "unknown profile smok (did you mean smoke?)"),
        (
            {"rackproof_gpu_model": "h200", "rackproof_gpu_count": 8},
            [],
            "unknown rackproof_gpu_model h200 (did you mean h200-nvl or h200-sxm?)",
        ),
        (
            {"rackproof_gpu_count": 1, "rackproof_gpu_model": "h200-smx"},
            [],
            "unknown rackproof_gpu_model h200-smx (did you mean h200-sxm?)",
        ),
        ({"rackproof_criteria": ["h100-smx"]}, [], "unknown criteria pack h100-smx (did you mean h100-sxm?)"),
        ({"rackproof_criteria": ["no/such.yml"]}, [], "no/such.yml: No such file or directory"),
    ],
)
def test_invalid_plan_exits_64_with_a_message(
    tmp_path: Path, variables: dict[str, Any], arguments: list[str], message: str
) -> None:
    path = listing(tmp_path, {"h1": {"ansible_host": "10.0.0.1", **variables}})
    done = rackproof("plan", "--inventory", path, "--run-dir", tmp_path / "run", *arguments)
    assert (done.returncode, done.stdout) == (64, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plann"], "unknown verb 'plann' (did you mean plan?)"),
        (["plan"], "either -i with an inventory, or --hosts with their names"),
        (["plan", "-i", "no/such"], "inventory no/such: no such file or directory"),
        (["judge"], "required: run_dir"),
        ([], ""),
    ],
)
def test_wrong_command_line_exits_64(arguments: list[str], message: str) -> None:
    done = rackproof(*arguments)
    assert done.returncode == 64
    assert message in done.stderr


def test_real_inventory_is_read_through_ansible(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yml"
    path.write_text(
        "gpu_hosts:\n  children:\n    rack1:\n      hosts:\n        a: {ansible_host: 10.0.0.1}\n"
        "      vars: {rackproof_rack: rack1}\n"
    )
    hosts = read_inventory([str(path)])
    hosts["a"].pop("ansible_local", None)  # Ansible adds it if inject_facts_as_vars is off
    assert hosts == {"a": {"ansible_host": "10.0.0.1", "rackproof_rack": "rack1"}}


def test_run_is_resumed_with_the_same_hosts_and_refused_with_other_hosts(tmp_path: Path) -> None:
    hosts = {name: {"ansible_host": f"10.0.0.{name[1]}", "rackproof_profile": "rehearsal"} for name in ("h1", "h2")}

    def begin(hosts: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        """Run `rackproof plan` in a separate process, because the lock of the run is held until the process ends."""
        command = [sys.executable, ROOT / "rackproof", "plan", "--run-dir", tmp_path / "r1", "--inventory"]
        return subprocess.run([*command, listing(tmp_path, hosts)], capture_output=True, text=True, check=False)

    assert begin(hosts).returncode == 0
    first = (tmp_path / "r1" / "plan.json").read_text()
    assert begin(hosts).returncode == 0
    assert (tmp_path / "r1" / "plan.json").read_text() == first
    more = hosts | {"h3": {"ansible_host": "10.0.0.3", "rackproof_profile": "rehearsal"}}
    before = {path.name: path.read_text() for path in (tmp_path / "r1").iterdir()}
    refused = begin(more)
    assert refused.returncode == 64
    assert "was begun with other values of hosts" in refused.stderr
    assert {path.name: path.read_text() for path in (tmp_path / "r1").iterdir()} == before, (
        "a refused plan must not change a file of the run"
    )


def test_pairs_of_hosts_are_measured_on_the_gpu_indices_that_all_hosts_of_the_gang_have() -> None:
    hosts = builders.inventory("h1", "h2", "h3", "h4", rackproof_gpu_count=4)
    hosts["h3"]["rackproof_gpu_count"] = 2
    plan = make_plan(read_profile("standard"), hosts, run_id="r1", nonce=builders.NONCE, created=builders.WHEN)
    assert plan_from_json(documents.parse(json.dumps(to_json(plan)), source="plan")) == plan
    documents.validate(to_json(plan), "plan", source="plan")
    (item,) = (item for item in plan.expected if item.name == "pairs.bandwidth")
    for name in hosts:
        others = [other for other in hosts if other != name]
        scopes = {f"gpu={index},partner={other}" for other in others for index in (0, 1)}
        assert set(plan.scopes_of(plan.host(name), item)) == scopes


def test_mnnvl_benchmark_is_planned_only_if_the_inventory_has_an_nvlink_domain() -> None:
    for variables, is_planned in (({}, False), ({"rackproof_nvlink_domain": "nvl1"}, True)):
        plan = builders.plan("h1", "h2", profile="standard", **variables)
        assert ("mnnvl" in plan.stage("gang").benchmarks) is is_planned
        assert any(item.params.get("benchmark") == "mnnvl" for item in plan.expected) is is_planned
        assert not any(item.name.startswith("mnnvl.") for item in plan.expected)


def test_nvlink_domain_of_a_launch_is_the_one_that_all_its_hosts_share() -> None:
    plan = builders.plan("h1", "h2", "h3", profile="standard", rackproof_nvlink_domain="nvl1")
    other = replace(plan, hosts=(*plan.hosts[:2], replace(plan.hosts[2], nvlink_domain="")))
    assert common_domain(plan, ["h1", "h2", "h3"]) == "nvl1"
    assert common_domain(other, ["h1", "h2"]) == "nvl1"
    assert common_domain(other, ["h1", "h2", "h3"]) == ""
    assert common_domain(plan, ["h1"]) == "", "a single host has no NVLink to another host"
