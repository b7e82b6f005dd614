"""Describe scopes (the parts of a host that readings and verdicts refer to) in words: which GPU, pair of GPUs or link."""

from __future__ import annotations

from collections.abc import Iterable

from schemas.scopes import Scope, directory_path

_MAX_SUFFIXES = 4
"""Maximum number of suffixes in a list of scopes. A suffix is the text after the device: `, link 2`.

If there are more, only the number of scopes is given: `56 pairs of GPUs`. A list that contains a NIC, a disk or another device
without an index is never shortened.
"""
_DEVICES = {"gpu": "GPU", "cpu": "process"}
"""Kind of device -> its name in text. A benchmark of processors gives each of its processes an index: `cpu=3`."""
_KINDS = {
    "nic": "NIC",
    "hca": "adapter",
    "mc": "memory controller",
    "pci": "PCI device",
    "dimm": "memory slot",
    "numa": "NUMA node",
    "psu": "power supply",
    "redundancy": "redundant group",
    "detector": "leak detector",
    "log": "event log",
}
"""Kind of device -> its name in text. A kind that is not in this table is its own name in text, such as `disk`."""


def describe_scope(scope: str) -> str:
    """Return a scope in words: `GPU 3, hw thermal` for `gpu=3,reason=hw_thermal`."""
    return describe_scopes([scope])


def describe_scopes(scopes: Iterable[str]) -> str:
    """Return several scopes as one phrase: `GPU 0–7` for `gpu=0` to `gpu=7`."""
    indexes: dict[tuple[str, str], list[int]] = {}
    others: dict[str, None] = {}
    only_pairs = True
    for scope in map(Scope.parse, scopes):
        suffix = "".join(map(_suffix, scope.below.split(","))) if scope.below else ""
        only_pairs = only_pairs and scope.kind == "peer"
        if scope.device_kind in _DEVICES and scope.index is not None:
            indexes.setdefault((_DEVICES[scope.device_kind], suffix), []).append(scope.index)
        else:
            others[f"{_device(scope)}{suffix}"] = None
    if len(indexes) > _MAX_SUFFIXES and not others:
        return f"{sum(map(len, indexes.values()))} {'pairs of GPUs' if only_pairs else 'parts'}"
    devices = (f"{kind} {_ranges(numbers)}{suffix}" for (kind, suffix), numbers in indexes.items())
    return "; ".join([*devices, *others])


def _device(scope: Scope) -> str:
    """Return the device of a scope in words, such as `NIC of rail 5`, `adapter mlx5_0` or `disk sda`."""
    kind, name = scope.device_kind, scope.device.partition("=")[2]
    if kind == "directory":
        return f"directory {directory_path(name)}"
    rail = name.removeprefix("rail")
    if kind == "nic" and rail != name and rail.isdecimal():
        return f"NIC of rail {rail}"
    return f"{_KINDS.get(kind, kind)} {name}".strip()


def _suffix(label: str) -> str:
    """Return the text of a label after the device: ` to GPU 1` for `peer=1`, `, link 2` for `link=2`."""
    kind, _, value = label.partition("=")
    return {"reason": f", {value.replace('_', ' ')}", "peer": f" to GPU {value}"}.get(
        kind, f", {label.replace('=', ' ')}"
    )


def _ranges(numbers: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
