"""Parsers for CDI (Container Device Interface) specifications, in JSON or in the YAML that `nvidia-ctk cdi generate` writes."""

from __future__ import annotations

import json
import re

CDI_DIRECTORIES = ("var/run/cdi", "run/cdi", "etc/cdi")
"""Directories of specifications. An earlier one takes precedence over the later ones."""
CDI_KIND = "nvidia.com/gpu"


def device_names(specification: str) -> list[str]:
    """Return the names of the devices in a specification. Raises ValueError, TypeError, LookupError or RecursionError."""
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
    """Return the kind, e.g. `nvidia.com/gpu`, or an empty string."""
    match = re.search(r"(?:^|[{,])\s*\"?kind\"?:\s*\"?([\w./-]+)", specification, re.MULTILINE)
    return match.group(1) if match else ""


def driver_versions(specification: str) -> set[str]:
    """Return the driver versions in the names of the libraries that a specification mounts."""
    return set(re.findall(r"/lib(?:cuda|nvidia-ml)\.so\.(\d+\.\d+(?:\.\d+)*)", specification))
