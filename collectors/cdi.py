"""Parsers for CDI (Container Device Interface) specifications, in JSON or in the YAML that `nvidia-ctk cdi generate` writes."""

from __future__ import annotations

import json
import re

CDI_DIRECTORIES = ("var/run/cdi", "run/cdi", "etc/cdi")
"""Directories with specifications. Those in an earlier directory take precedence."""
CDI_KIND = "nvidia.com/gpu"


def device_names(specification: str) -> list[str]:
    """Return the names of the devices in a specification.

    Raises:
        ValueError, TypeError, LookupError, RecursionError: the specification is malformed.
    """
    if specification.lstrip().startswith("{"):
        document = json.loads(specification)
        devices = document.get("devices", []) if isinstance(document, dict) else []
        return [str(device["name"]) for device in devices]
    section = re.search(r"^devices:[ \t]*\n((?:[ \t-].*\n?|\n)*)", specification, re.MULTILINE)
    body = section.group(1) if section else ""
    first = re.match(r"\s*?([ \t]*)- ", body)
    if not first:
        return []
    indent = first.group(1)
    names = re.findall(rf"^{indent}(?:- |  )name:[ \t]*(.+?)[ \t]*$", body, re.MULTILINE)
    return [name.strip("\"'") for name in names]


def specification_kind(specification: str) -> str:
    """Return the `kind` of a specification, e.g. `nvidia.com/gpu`; empty if it has none."""
    match = re.search(r"(?:^|[{,])\s*\"?kind\"?:\s*\"?([\w./-]+)", specification, re.MULTILINE)
    return match.group(1) if match else ""


def driver_versions(specification: str) -> set[str]:
    """Return the driver versions in the names of the libraries that a specification mounts."""
    return set(re.findall(r"/lib(?:cuda|nvidia-ml)\.so\.(\d+\.\d+(?:\.\d+)*)", specification))
