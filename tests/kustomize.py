"""Render the kustomize overlays without kubectl: resources, components, namespace, images and JSON patches.

So the tests need no kubectl. If kubectl is installed, a test compares its output with the output of this module.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

KNOWN = {"apiVersion", "kind", "namespace", "resources", "components", "images", "patches"}
CLUSTER_WIDE = ("ClusterRole",)

Resource = dict[str, Any]


def render(directory: Path) -> list[Resource]:
    """Return the resources of an overlay, in no particular order."""
    return _apply(directory, [])


def _apply(directory: Path, resources: list[Resource]) -> list[Resource]:
    """Add the resources of the kustomization in `directory` to `resources`, apply its changes to all of them, and return them."""
    (document,) = _documents(directory / "kustomization.yaml")
    unknown = set(document) - KNOWN
    assert not unknown, f"{directory}: this renderer does not support {unknown}"
    for name in document.get("resources", ()):
        path = directory / name
        resources += _apply(path.resolve(), []) if path.is_dir() else _documents(path)
    for name in document.get("components", ()):
        resources = _apply((directory / name).resolve(), resources)
    for patch in document.get("patches", ()):
        _patch(resources, patch)
    for image in document.get("images", ()):
        for resource in resources:
            _replace_image(resource, image)
    for resource in resources if "namespace" in document else ():
        _set_namespace(resource, document["namespace"])
    return resources


def _documents(path: Path) -> list[Resource]:
    return [item for item in yaml.safe_load_all(path.read_text(encoding="utf-8")) if item]


def _patch(resources: list[Resource], patch: dict[str, Any]) -> None:
    target = patch["target"]
    targets = [
        r for r in resources if r["kind"] == target["kind"] and target.get("name") in (None, r["metadata"]["name"])
    ]
    assert targets, f"no resource matches the target of a patch: {target}"
    for resource in targets:
        for step in yaml.safe_load(patch["patch"]):
            *parents, last = (part.replace("~1", "/") for part in step["path"].strip("/").split("/"))
            node: Any = resource
            for part in parents:
                node = node[int(part)] if isinstance(node, list) else node[part]
            value = copy.deepcopy(step["value"])
            if isinstance(node, list):
                assert (step["op"], last) == ("add", "-")
                node.append(value)
            else:
                assert step["op"] in (("add", "replace") if last in node else ("add",)), step
                node[last] = value


def _replace_image(value: Any, image: dict[str, str]) -> None:
    """Replace `image["name"]` by its new name and tag in every container that uses it."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key in ("containers", "initContainers") and isinstance(item, list):
                for container in item:
                    if container.get("image") == image["name"]:
                        container["image"] = f"{image['newName']}:{image['newTag']}"
            _replace_image(item, image)
    elif isinstance(value, list):
        for item in value:
            _replace_image(item, image)


def _set_namespace(resource: Resource, namespace: str) -> None:
    if resource["kind"] not in CLUSTER_WIDE:
        resource["metadata"]["namespace"] = namespace
    for subject in resource.get("subjects", ()):
        if subject["kind"] == "ServiceAccount":
            subject.setdefault("namespace", namespace)
