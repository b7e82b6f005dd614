"""Check that the nodes of a cluster offer the GPUs that a plan needs. If they do not, pods of the plan stay pending.

    kubectl get nodes -o json | python3 deploy/kubernetes/check_nodes.py --plan runs/r1/plan.json

Exit codes: 0 the cluster can run all hosts of the plan at the same time, 1 it cannot, 64 wrong usage. GPUs that other pods use
count as free. The script needs only Python.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

RESOURCE = "nvidia.com/gpu"
TOLERATED = (RESOURCE,)
"""Keys of the taints that the pods in deploy/kubernetes tolerate."""
SHARED, MIG = f"{RESOURCE}.shared", "nvidia.com/mig-"
"""SHARED: resource name that the device plugin can be configured to use for shared GPUs. MIG: prefix of the resource names of MIG
partitions."""
STRATEGY, PRODUCT, COUNT = f"{RESOURCE}.sharing-strategy", f"{RESOURCE}.product", f"{RESOURCE}.count"
"""Node labels of GPU Feature Discovery: how pods share GPUs, the GPU model (shared GPUs and MIG partitions have a suffix such as
`-SHARED` or `-MIG-1g.10gb`), and the number of GPUs."""
SELECTOR = f"{RESOURCE}.present=true"
"""Label of the nodes on which the pods of most overlays in deploy/kubernetes run. GPU Feature Discovery sets it."""
CONDITION_TAINTS = "node.kubernetes.io/"
"""Prefix of the taints that Kubernetes sets for a condition of a node, such as `not-ready` or `disk-pressure`."""


class Parser(argparse.ArgumentParser):
    """Parser that exits with 64 on wrong options."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit."""
        self.exit(64, f"check_nodes: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check and return the exit code."""
    parser = Parser(description="Check that nodes offer the GPUs that a plan needs.")
    parser.add_argument("--plan", required=True, help="plan.json of the run")
    parser.add_argument(
        "--selector",
        default=SELECTOR,
        metavar="LABEL=VALUE",
        help=f"check only nodes with this label: the nodeSelector of the pods (default: {SELECTOR})",
    )
    options = parser.parse_args(arguments)
    try:
        with Path(options.plan).open(encoding="utf-8") as file:
            plan = json.load(file)
        nodes = json.load(sys.stdin)["items"]
        wanted = {host["name"]: len(host["devices"]) for host in plan["hosts"] if host["device"] == "gpu"}
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.stderr.write(
            f"check_nodes: {error}: give a plan.json, and the output of `kubectl get nodes -o json` on standard input\n"
        )
        return 64
    key, _, value = options.selector.partition("=")
    chosen = [node for node in nodes if node["metadata"].get("labels", {}).get(key) == value]
    lines, fits = check_nodes(wanted, chosen)
    if len(chosen) < len(nodes):
        lines.insert(0, f"nodes without the label {options.selector}, which run no pod: {len(nodes) - len(chosen)}")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if fits else 1


def check_nodes(wanted: Mapping[str, int], nodes: Sequence[Mapping[str, Any]]) -> tuple[list[str], bool]:
    """Return the output lines (one for each node, and a summary), and whether all hosts of the plan fit on the nodes.

    If at least one host of the plan has the name of a node, each host needs the node of its name. Other nodes are ignored.
    Otherwise any node may run any host, so each node must have enough GPUs for the largest host.

    Args:
        wanted: host of the plan -> number of GPUs that it needs.
        nodes: nodes as the Kubernetes API returns them.
    """
    most = max(wanted.values(), default=0)
    by_name = {str(node["metadata"]["name"]): node for node in nodes}
    named = set(wanted) & set(by_name)
    lines, usable = [], 0
    for name, node in sorted(by_name.items()):
        if named and name not in wanted:
            continue
        problems = problems_of(node, wanted.get(name, most))
        usable += not problems
        lines.append(f"{name}: {'; '.join(problems) or f'{allocatable(node)} GPUs'}")
    absent = sorted(set(wanted) - set(by_name)) if named else []
    lines += [f"{name}: the cluster has no such node, or --selector leaves it out" for name in absent]
    fits = usable >= len(wanted)
    lines.append(f"hosts in the plan: {len(wanted)}; usable nodes: {usable}{'' if fits else ', not enough'}")
    return lines, fits


def problems_of(node: Mapping[str, Any], wanted: int) -> list[str]:
    """Return the problems of this node for a pod that requests `wanted` GPUs.

    An unhealthy GPU is a problem even if enough healthy GPUs remain.
    """
    problems = []
    reported: set[str] = set()  # taints that Kubernetes sets for a condition that is already in `problems`
    name, status, spec = node["metadata"]["name"], node.get("status", {}), node.get("spec", {})
    ready = [item for item in status.get("conditions", []) if item.get("type") == "Ready"]
    if not ready or ready[0].get("status") != "True":
        problems.append("not Ready")
        reported |= {f"{CONDITION_TAINTS}not-ready", f"{CONDITION_TAINTS}unreachable"}
    if spec.get("unschedulable"):
        problems.append(f"cordoned: kubectl uncordon {name}")
        reported.add(f"{CONDITION_TAINTS}unschedulable")
    taints = (taint["key"] for taint in spec.get("taints", []) if taint.get("effect") in ("NoSchedule", "NoExecute"))
    for key in dict.fromkeys(taints):
        if key.startswith(CONDITION_TAINTS) and key not in reported:
            problems.append(f"taint {key}: see kubectl describe node {name}")
        elif not key.startswith(CONDITION_TAINTS) and key not in TOLERATED:
            problems.append(f"taint {key}, which the manifests do not tolerate: add a toleration")
    allocatable_count, capacity = allocatable(node), int(status.get("capacity", {}).get(RESOURCE, 0))
    if divided := divided_gpus(node):
        problems.append(divided)
    elif RESOURCE not in status.get("capacity", {}):
        problems.append(f"no {RESOURCE}: the device plugin is not running on the node, or it finds no driver")
    elif allocatable_count < capacity:
        problems.append(
            f"{capacity - allocatable_count} of {capacity} GPUs are unhealthy according to the device plugin"
        )
    elif allocatable_count < wanted:
        problems.append(f"{allocatable_count} GPUs, but the plan needs {wanted}")
    return problems


def divided_gpus(node: Mapping[str, Any]) -> str:
    """Return why the node does not offer whole GPUs: MIG divides them, or several pods may share one.

    Return an empty string if the node offers whole GPUs.
    """
    labels, capacity = node["metadata"].get("labels", {}), node.get("status", {}).get("capacity", {})
    product, strategy = labels.get(PRODUCT, ""), labels.get(STRATEGY, "none")
    partitions = sorted(name for name, count in capacity.items() if name.startswith(MIG) and str(count) != "0")
    if partitions or "-MIG-" in product:
        names = ", ".join(partitions) or product
        return f"the GPUs are divided by MIG ({names}): set the node label nvidia.com/mig.config=all-disabled"
    offered, count = int(capacity.get(RESOURCE, 0)), labels.get(COUNT, "")
    is_multiplied = count.isdecimal() and offered > int(count) > 0
    if SHARED in capacity or strategy != "none" or product.endswith("-SHARED") or is_multiplied:
        name = strategy if strategy != "none" else "time-slicing or MPS"
        return f"several pods can share a GPU ({name}): remove `sharing` from the configuration of the device plugin"
    return ""


def allocatable(node: Mapping[str, Any]) -> int:
    """Return the number of GPUs that pods can use on this node, including those already in use."""
    return int(node.get("status", {}).get("allocatable", {}).get(RESOURCE, 0))


if __name__ == "__main__":
    sys.exit(main())
