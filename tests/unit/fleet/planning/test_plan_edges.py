"""Edge cases of plans: variables and settings, also at their limits, reach the plan; invalid values are refused with a reason."""

from __future__ import annotations

import json
import sys
from configparser import ConfigParser
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleet.inventory.ansible import SETTINGS, check_addresses, check_listing, hosts_of, read_inventory
from fleet.planning.plan import make_plan, read_profile
from fleet.planning.stage_times import parse_duration
from schemas.baselines import PlannedBaseline
from schemas.catalogue import Expectation
from schemas.errors import UsageError
from schemas.plans import Part, Plan
from schemas.waivers import Waiver
from tests import ROOT, builders


def plan_of(hosts: dict[str, dict[str, Any]], profile: str = "smoke", **more: Any) -> Plan:
    return make_plan(read_profile(profile), hosts, run_id="r1", nonce=builders.NONCE, created=builders.WHEN, **more)


def profile_with(tmp_path: Path, benchmarks: str, name: str = "mine.yml", stage: str = "benchmark") -> Path:
    """Write a profile with one stage and return its path. `benchmarks`: the YAML line with the benchmarks of the stage."""
    path = tmp_path / name
    path.write_text(
        "schema: rackproof.profile/1\nsummary: mine\ndevice: gpu\n"
        f"stages:\n  {stage}:\n    deadline_s: 1\n    collective_timeout_s: 1\n    {benchmarks}\n"
    )
    return path


# Variables of the inventory


def test_host_variables_reach_the_plan() -> None:
    hosts = builders.inventory(
        rackproof_gpu_count=3,
        rackproof_gpu_devices=[1, 4, 6],
        rackproof_gpu_model="h100-sxm",
        rackproof_fabric_gbps=400,
        rackproof_environment={"NCCL_IB_HCA": "mlx5"},
        rackproof_share_gpus=True,
    )
    hosts["h2"]["rackproof_fabric_address"] = "fd00::2"
    first, second = plan_of(hosts).hosts
    assert (first.name, first.address, second.address) == ("h1", "10.0.0.1", "fd00::2")
    assert (first.devices, first.scopes) == ((1, 4, 6), ("gpu=1", "gpu=4", "gpu=6"))
    assert (first.rack, first.gang, first.device) == ("r1", "r1", "gpu")
    assert (first.gpu_model, first.fabric_gbps, first.share_gpus) == ("h100-sxm", 400.0, True)
    assert first.environment == {"NCCL_IB_HCA": "mlx5"}


@pytest.mark.parametrize(
    ("variable", "value", "attribute", "planned", "default"),
    [
        ("rackproof_infiniband_ports", 8, "infiniband_ports", 8, 0),
        ("rackproof_verbs_required", True, "verbs_required", True, False),
        ("rackproof_dimm_count", 32, "dimm_count", 32, 0),
        ("rackproof_memory_mts", 5600, "memory_mts", 5600.0, 0.0),
        ("rackproof_host_memory_gbyteps", 300, "host_memory_gbyteps", 300.0, 0.0),
        ("rackproof_vbios_version", "96.00.89.00.01", "vbios_version", "96.00.89.00.01", ""),
        ("rackproof_bmc_address", "10.1.0.1", "bmc", True, False),
        ("rackproof_nvlink_domain", "d1", "nvlink_domain", "d1", ""),
        ("nvidia_driver_version", "580.95.05", "driver_version", "580.95.05", ""),
    ],
)
def test_variable_of_one_host_reaches_only_this_host(
    variable: str, value: object, attribute: str, planned: object, default: object
) -> None:
    hosts = builders.inventory(rackproof_gpu_count=2)
    hosts["h1"][variable] = value
    first, second = plan_of(hosts).hosts
    assert (getattr(first, attribute), getattr(second, attribute)) == (planned, default)


def test_driver_version_is_not_required_if_the_driver_is_ignored() -> None:
    hosts = builders.inventory(rackproof_gpu_count=2, nvidia_driver_version="580.95.05", nvidia_driver_state="checked")
    hosts["h2"]["nvidia_driver_state"] = "ignored"
    assert [host.driver_version for host in plan_of(hosts).hosts] == ["580.95.05", ""]


def test_line_rate_of_a_host_is_the_sum_over_its_gpus() -> None:
    (host, _) = plan_of(builders.inventory(rackproof_gpu_count=2, rackproof_fabric_gbps=400)).hosts
    assert host.fabric == 2 * 400 / 8 * 1e9


@pytest.mark.parametrize("name", ["site", "purchase_order", "operator", "reason"])
def test_texts_of_the_certificate_reach_the_plan(name: str) -> None:
    plan = plan_of(builders.inventory(rackproof_gpu_count=2, **{f"rackproof_{name}": "Hall 3"}))
    assert {key: getattr(plan, key) for key in ("site", "purchase_order", "operator", "reason")} == {
        key: "Hall 3" if key == name else "" for key in ("site", "purchase_order", "operator", "reason")
    }


def test_missing_host_variables_have_defaults() -> None:
    plan = plan_of({"h1": {"rackproof_gpu_count": 2}, "h2": {"rackproof_gpu_count": 2}})
    host = plan.host("h1")
    assert (host.address, host.rack, host.devices) == ("h1", "unassigned", (0, 1))
    assert (host.gpu_model, host.fabric_gbps, host.environment, host.share_gpus) == ("", 0.0, {}, False)
    assert plan.gangs() == {"unassigned": ("h1", "h2")}
    assert (plan.criteria, plan.grafana_url, plan.reason) == ((), "", "")


def test_run_wide_settings_reach_the_plan() -> None:
    part = Part(host="h1", kind="nic", serial="b8cef603006d7a1c")
    waiver = Waiver(criterion="ecc", who="ops", why="on order", until="2026-12-31")
    baseline = PlannedBaseline(directory="/srv/baseline", digest="0" * 64)
    hosts = builders.inventory(
        rackproof_gpu_count=1,
        rackproof_criteria=["h100-sxm", "mine.yml"],
        rackproof_grafana_url="https://grafana.example/d/1",
        rackproof_reason="  new\n memory  ",
    )
    plan = plan_of(hosts, manifest=[part], waivers=[waiver], baseline=baseline)
    assert plan.criteria == ("h100-sxm", "mine.yml")
    assert (plan.grafana_url, plan.reason) == ("https://grafana.example/d/1", "new memory")
    assert (plan.manifest, plan.waivers, plan.baseline) == ((part,), (waiver,), baseline)
    assert (plan.run_id, plan.nonce, plan.created) == ("r1", builders.NONCE, builders.WHEN)
    assert (plan.profile, plan.rehearsal) == ("smoke", False)


def test_gang_contains_a_rack_or_all_hosts_or_no_host() -> None:
    hosts = builders.inventory("h1", "h2", "h3", "h4", rackproof_gpu_count=1)
    for name in ("h3", "h4"):
        hosts[name]["rackproof_rack"] = "r2"
    assert plan_of(hosts).gangs() == {"r1": ("h1", "h2"), "r2": ("h3", "h4")}
    for variables in hosts.values():
        variables["rackproof_gang"] = "all"
    assert plan_of(hosts).gangs() == {"all": ("h1", "h2", "h3", "h4")}
    for name in ("h1", "h3"):
        hosts[name]["rackproof_gang"] = "none"
    plan = plan_of(hosts)
    assert plan.gangs() == {"all": ("h2", "h4")}, "hosts without a gang must not affect the gang of other hosts"
    assert [stage.name for stage in plan.stages] == ["benchmark", "gang"]


def test_plan_without_a_gang_has_no_gang_stage() -> None:
    without_gang = plan_of(builders.inventory(rackproof_gpu_count=2, rackproof_gang="none"))
    assert [stage.name for stage in without_gang.stages] == ["benchmark"]
    assert {item.stage for item in without_gang.expected} == {"benchmark"}


def test_profile_without_gang_stage_has_no_gangs(tmp_path: Path) -> None:
    plan = plan_of(
        builders.inventory("h1", rackproof_gpu_count=1), str(profile_with(tmp_path, "benchmarks: {gemm: {}}"))
    )
    assert (plan.gangs(), plan.host("h1").gang) == ({}, "")


def test_gang_needs_the_minimum_number_of_hosts() -> None:
    three = builders.inventory("h1", "h2", "h3", rackproof_gpu_count=1, rackproof_gang_minimum=3)
    assert plan_of(three).gangs() == {"r1": ("h1", "h2", "h3")}
    del three["h3"]
    with pytest.raises(UsageError, match=r"gang r1 has 2 hosts \(h1, h2\), 3 are needed"):
        plan_of(three)


def test_rehearsal_plans_processes_and_no_gpu_observations() -> None:
    plan = plan_of({"h1": {}, "h2": {"rackproof_gpu_count": 8}}, "rehearsal")
    assert plan.rehearsal
    assert [host.scopes for host in plan.hosts] == [("cpu=0", "cpu=1")] * 2
    expected = {item.name for item in plan.expected}
    assert "transformer.throughput" in expected
    assert "transformer.mfu" not in expected
    assert "transformer.mfu" in {item.name for item in builders.plan().expected}


@pytest.mark.parametrize(
    "key",
    [
        "rackproof_criteria",
        "rackproof_gang_minimum",
        "rackproof_soak_duration",
        "rackproof_waivers",
        "rackproof_profile",
    ],
)
def test_run_wide_variable_that_only_one_host_has_is_refused(key: str) -> None:
    hosts = builders.inventory(rackproof_gpu_count=1)
    hosts["h2"][key] = "x"
    with pytest.raises(UsageError, match=f"{key} is None on host h1 and 'x' on host h2"):
        plan_of(hosts)


def test_epochs_are_set_for_training_but_not_for_collectives() -> None:
    plan = builders.plan(profile="smoke", rackproof_epochs=7)
    assert plan.stage("gang").benchmarks["training"] == {"networks": ["convnet"], "epochs": 7}
    assert "epochs" not in plan.stage("gang").benchmarks["collective"]


def test_validation_omits_training_and_straggler() -> None:
    plan = builders.plan(profile="smoke")
    validation = builders.plan(profile="smoke", rackproof_validation_only=True)
    assert set(plan.stage("gang").benchmarks) - set(validation.stage("gang").benchmarks) == {"training", "straggler"}


# The manifest


def parts(host: str, count: int, kind: str = "gpu") -> list[Part]:
    """Return `count` lines of a manifest for parts of this kind."""
    return [Part(host=host, kind=kind, serial=f"{host}-{kind}-{number}") for number in range(count)]


def test_manifest_and_inventory_must_agree_on_gpu_counts() -> None:
    hosts = builders.inventory(rackproof_gpu_count=2)
    assert plan_of(hosts, manifest=parts("h1", 2) + parts("h2", 2)).manifest
    assert plan_of(hosts, manifest=parts("h1", 1, "nic")).manifest, (
        "a manifest without GPUs must not be compared with the inventory"
    )
    with pytest.raises(UsageError, match="host h2: the manifest lists 0 GPUs, but rackproof_gpu_count is 2"):
        plan_of(hosts, manifest=parts("h1", 2) + parts("h2", 4, "nic"))
    assert plan_of(hosts, "rehearsal", manifest=parts("h1", 8)).manifest, (
        "the manifest must not be compared in a rehearsal, which has no GPUs"
    )


# The soak


@pytest.mark.parametrize(
    ("text", "result"), [("90s", 90), ("45m", 2700), ("24h", 86400), ("2d", 172800), ("1d2h3m4s", 93784), ("0h", 0)]
)
def test_duration_accepts_days_hours_minutes_and_seconds(text: str, result: float) -> None:
    assert parse_duration(text) == result


@pytest.mark.parametrize("text", ["", "24", "h", "1h30", "-1h", "1.5h", "30m1h", "1h ", "1H", "1h\n"])
def test_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="write a duration such as 24h"):
        parse_duration(text)


@pytest.mark.parametrize(("duration", "result"), [("31d", 31 * 86400), ("1s", 1), (None, 86400)])
def test_soak_duration_comes_from_inventory_or_profile(duration: str | None, result: float) -> None:
    variables: dict[str, Any] = {"rackproof_soak_duration": duration} if duration else {}
    stage = builders.plan(profile="soak", rackproof_soak_stop_on="never", **variables).stage("soak")
    assert (stage.duration_s, stage.stop_on) == (result, "never")
    assert stage.longest_s == result + stage.deadline_s, "a round that began within the duration may finish"
    assert builders.plan(profile="soak").stage("soak").stop_on == "fatal"


@pytest.mark.parametrize("duration", ["0s", "31d1s", "32d"])
def test_soak_duration_out_of_range_is_refused(duration: str) -> None:
    with pytest.raises(UsageError, match=f"rackproof_soak_duration {duration}: give more than 0 and at most 31 d"):
        builders.plan(profile="soak", rackproof_soak_duration=duration)


# Profiles


def test_profile_may_be_any_yml_or_yaml_file(tmp_path: Path) -> None:
    for name in ("mine.yml", "mine.yaml"):
        assert read_profile(str(profile_with(tmp_path, "benchmarks: {gemm: {}}", name)))["name"] == "mine"
    with pytest.raises(UsageError, match=r"profile .*other\.yaml: no such file: give the path"):
        read_profile(str(tmp_path / "other.yaml"))


def test_shipped_profiles_are_listed_in_alphabetical_order() -> None:
    with pytest.raises(UsageError) as caught:
        read_profile("nothing-like-it")
    reported = str(caught.value).partition("choose one of ")[2].partition(", or give")[0].split(", ")
    assert reported == sorted(reported)
    assert "standard" in reported


@pytest.mark.parametrize(
    "settings",
    [
        "digest: {peer_copies: []}",
        "gemm: {size: 1}",
        "gemm: {seconds: 1}",
        "training: {max_steps: 0}",
        "collective: {graph_sizes_bytes: [1]}",
        "memory: {ops: [copy, triad]}",
        "scaling: {precision: bf16}",
    ],
)
def test_setting_at_its_limit_or_from_its_choices_is_accepted(tmp_path: Path, settings: str) -> None:
    read_profile(str(profile_with(tmp_path, f"benchmarks: {{{settings}}}")))


# Round trip and queries of a plan


def test_lookup_of_an_unplanned_name_raises_key_error() -> None:
    plan = builders.plan()
    for lookup in (lambda: plan.host("h9"), lambda: plan.stage("soak"), lambda: plan.of_cell(1)):
        with pytest.raises(KeyError):
            lookup()
    assert plan.stage("gang").name == "gang"


def test_plan_of_some_hosts_has_them_in_the_given_order() -> None:
    plan = plan_of(
        builders.inventory("h1", "h2", "h3", rackproof_gpu_count=2),
        manifest=parts("h1", 2) + parts("h2", 2) + parts("h3", 2),
    )
    part = plan.only(["h3", "h1"])
    assert [host.name for host in part.hosts] == ["h3", "h1"]
    assert (part.gangs(), part.manifest) == ({"r1": ("h3", "h1")}, ())
    assert (plan.ranks(["h1", "h3", "h3", "h9"]), plan.ranks([])) == (4, 0)


def expectation(name: str, scope: str, *, stage: str = "benchmark", peers: bool = False) -> Expectation:
    return Expectation(stage=stage, name=name, scope=scope, params={}, peers=peers)


def test_scopes_of_an_expected_observation_follow_from_its_kind() -> None:
    plan = builders.plan("h1", "h2", gpu_count=2)
    host = plan.host("h1")
    assert plan.scopes_of(host, expectation("x", "device")) == ("gpu=0", "gpu=1")
    assert plan.scopes_of(host, expectation("x", "pair")) == ("gpu=0,peer=1", "gpu=1,peer=0")
    assert plan.scopes_of(host, expectation("x", "host", stage="gang")) == ("host",)
    assert plan.scopes_of(host, expectation("x", "world")) == ("host",)
    assert plan.scopes_of(host, expectation("x", "world", stage="gang")) == ("gang=r1",)
    assert plan.scopes_of(host, expectation("pairs.bandwidth", "peers")) == (), "pairs of hosts exist only in a gang"
    without_gang = builders.plan("h1", rackproof_gang="none")
    assert without_gang.scopes_of(without_gang.host("h1"), expectation("pairs.bandwidth", "peers", stage="gang")) == ()


def test_observations_between_ranks_need_two_ranks_and_gang_stages_need_a_gang() -> None:
    hosts = builders.inventory("h1", "h2", "h3", "h4", rackproof_gpu_count=2)
    hosts["h3"]["rackproof_gpu_count"] = 1
    hosts["h4"]["rackproof_gang"] = "none"
    expected = (
        expectation("gemm.throughput", "device"),
        expectation("collective.all_reduce.busbw", "host", peers=True),
        expectation("collective.hypercube.busbw", "host", peers=True),
        expectation("collective.all_reduce.busbw", "world", stage="gang", peers=True),
        expectation("collective.hypercube.busbw", "world", stage="gang", peers=True),
    )
    plan = replace(plan_of(hosts), expected=expected)
    values = {host.name: [expected.index(item) for item in plan.expected_of(host)] for host in plan.hosts}
    assert values == {"h1": [0, 1, 2, 3], "h2": [0, 1, 2, 3], "h3": [0, 3], "h4": [0, 1, 2]}, (
        "a hypercube needs a number of ranks that is a power of two"
    )


# Reading the inventory


def test_json_inventory_is_read_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "inventory.json"

    def listing(**hosts: dict[str, Any]) -> list[str]:
        path.write_text(json.dumps({"_meta": {"hostvars": hosts}, "gpu_hosts": {"hosts": list(hosts)}}))
        return [str(path)]

    assert read_inventory(listing(h1={"site_name": "Süd"})) == {"h1": {"site_name": "Süd"}}
    with pytest.raises(UsageError, match="unknown variable rackproof_rak"):
        read_inventory(listing(h1={"rackproof_rak": "r1"}))
    with pytest.raises(UsageError, match="have the same address h1 port 22"):
        read_inventory(listing(h1={}, h2={"ansible_host": "h1"}))
    path.write_bytes(b'{"gpu_hosts": {"hosts": ["\xff"]}}')
    with pytest.raises(UsageError, match="not UTF-8"):
        read_inventory([str(path)])
    path.write_text("[]")
    with pytest.raises(UsageError, match="not an inventory"):
        read_inventory([str(path)])
    with pytest.raises(UsageError, match="No such file"):
        read_inventory([str(tmp_path / "none.json")])
    with pytest.raises(UsageError, match="inventory no/such: no such file or directory"):
        read_inventory(["no/such"])


def install_ansible_inventory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, *, next_to_python: bool = True
) -> None:
    """Install a shell script in place of ansible-inventory, either next to the Python interpreter or in a directory on PATH."""
    (tmp_path / "bin").mkdir()
    path = tmp_path / "bin" / "ansible-inventory"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str((path.parent if next_to_python else tmp_path) / "python"))
    monkeypatch.setenv("PATH", "/nowhere" if next_to_python else str(path.parent))


@pytest.mark.parametrize("next_to_python", [True, False])
def test_several_sources_are_read_by_ansible_inventory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, next_to_python: bool
) -> None:
    arguments_file = tmp_path / "arguments"
    listing = json.dumps({"gpu_hosts": {"hosts": ["a"]}})
    install_ansible_inventory(
        tmp_path, monkeypatch, f"echo \"$@\" > {arguments_file}; echo '{listing}'", next_to_python=next_to_python
    )
    paths = [str(tmp_path / name) for name in ("one.json", "two.json")]
    for path in paths:
        Path(path).write_text("{}")
    assert read_inventory([*paths, "a,"]) == {"a": {}}
    assert arguments_file.read_text().split() == ["-i", paths[0], "-i", paths[1], "-i", "a,", "--list"]


def test_ansible_error_is_shortened_to_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_ansible_inventory(
        tmp_path,
        monkeypatch,
        "echo '[ERROR]: no parser <<< caused by >>> did not find a key. Origin: /x/hosts.yml:3:1 and so on' >&2; exit 4",
    )
    with pytest.raises(UsageError) as caught:
        read_inventory(["a,"])
    assert str(caught.value) == "inventory a,: /x/hosts.yml:3:1: did not find a key."


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "hosts.yml",
            "gpu_hosts:\n  children:\n    rack: {hosts: {h1: }}\n    vars:\n    ansible_user: ubuntu\n",
            r"/hosts\.yml: ansible_user is not a known host nor group: check the indentation",
        ),
        ("hosts.yml", "gpu_hosts:\n\thosts: {h1: }\n", r"/hosts\.yml:2:1: .*Tabs"),
        (
            "hosts.yml",
            "gpu_hosts:\n  hosts: {h1: }\n  vars:\n    rackproof_gpu_count: 8\n    rackproof_gpu_count: 4\n",
            r"/hosts\.yml:5:5: .*duplicate mapping key 'rackproof_gpu_count'",
        ),
        ("hosts.ini", "[gpu_hosts]\nh1 rackproof_gpu_count 8\n", r"/hosts\.ini: .*Expected key=value"),
        ("parts.yml", "- {host: h1, kind: gpu}\n", r"/parts\.yml: .*move other files to another directory"),
    ],
)
def test_mistake_in_one_file_of_an_inventory_is_an_error(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / "a.yml").write_text("gpu_hosts:\n  hosts: {h0: }\n")
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=message):
        read_inventory([str(tmp_path)])


def test_manifest_in_the_inventory_directory_is_not_read_as_an_inventory(tmp_path: Path) -> None:
    (tmp_path / "hosts.yml").write_text("gpu_hosts:\n  hosts: {h1: }\n")
    (tmp_path / "order.csv").write_text("host,kind,slot,serial\nh1,module,mlx5_0,MT 2601\n")
    assert list(read_inventory([str(tmp_path)])) == ["h1"]


def test_ansible_inventory_runs_with_the_settings_of_ansible_cfg() -> None:
    config = ConfigParser()
    config.read(ROOT / "ansible.cfg")
    assert {
        "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": config["inventory"]["any_unparsed_is_failed"],
        "ANSIBLE_INVENTORY_IGNORE": config["inventory"]["ignore_extensions"],
        "ANSIBLE_DUPLICATE_YAML_DICT_KEY": config["defaults"]["duplicate_dict_key"],
    } == SETTINGS


def test_ansible_that_does_not_finish_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_ansible_inventory(tmp_path, monkeypatch, "exec /bin/sleep 30")
    monkeypatch.setattr("fleet.inventory.ansible.DEADLINE_S", 0.05)
    with pytest.raises(UsageError, match=r"ansible-inventory did not finish within 0\.05 s: run"):
        read_inventory(["a,"])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"gpu_hosts": ["h1"]}, "gpu_hosts is not a mapping"),
        ({"gpu_hosts": {"hosts": "h1"}}, "gpu_hosts.hosts is not a list of names"),
        ({"gpu_hosts": {"hosts": [7]}}, "gpu_hosts.hosts is not a list of names"),
        ({"gpu_hosts": {"children": {"rack1": {}}}}, "gpu_hosts.children is not a list of names"),
        ({"_meta": []}, "_meta is not a mapping"),
        ({"_meta": {"hostvars": {"h1": 3}}}, "_meta.hostvars has no mapping of variables for h1"),
        ({"_meta": {"hostvars": []}}, "_meta.hostvars has no mapping of variables for h1"),
        ({"_meta": {"names": 3}}, "_meta.names is not a list of names"),
    ],
)
def test_error_names_the_invalid_key_of_a_json_inventory(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(
        UsageError, match=f"{message}.*: write the inventory in the format of `ansible-inventory --list`"
    ):
        check_listing({"gpu_hosts": {"hosts": ["h1"]}, "_meta": {"hostvars": {}}} | changed)


def test_error_says_what_to_install_if_ansible_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"install rackproof\[control\]"):
        read_inventory(["a,"])


def test_duplicate_addresses_are_reported_with_their_port() -> None:
    with pytest.raises(UsageError, match="hosts a and b have the same address a port 22"):
        check_addresses({"a": {}, "b": {"ansible_host": "a", "ansible_port": 22}})
    local = {"ansible_host": "10.0.0.1", "ansible_connection": "local"}
    check_addresses({"a": local, "b": local, "c": {"ansible_host": "10.0.0.1"}})


def test_missing_group_without_a_similar_name_has_no_suggestion() -> None:
    with pytest.raises(UsageError) as caught:
        hosts_of({"_meta": {}, "web": {}})
    assert "did you mean" not in str(caught.value)


def test_error_on_an_unknown_choice_of_a_setting_suggests_the_nearest_choice(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"scaling\.precision does not accept fp23 \(did you mean fp32\?\): choose from fp32, bf16"
    ):
        read_profile(str(profile_with(tmp_path, "benchmarks: {scaling: {precision: fp23}}")))
