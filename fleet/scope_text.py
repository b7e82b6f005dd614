"""Describe scopes in words: which GPU, which pair of GPUs, which link."""

from __future__ import annotations

from collections.abc import Iterable

from schemas.scopes import Scope, directory_path

_MAX_SUFFIXES = 4
"""Largest number of different suffixes, such as links, that are listed. If there are more, and every scope is of a GPU or a
process, only the number of parts is given."""
_DEVICES = {"gpu": "GPU", "cpu": "process"}
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
"""Kind of device -> its name in text; any other kind is its own name."""


def describe_scope(scope: str) -> str:
    """Return `gpu=3,reason=hw_thermal` as `GPU 3, hw thermal`."""
    return describe_scopes([scope])


def describe_scopes(scopes: Iterable[str]) -> str:
    """Return several scopes as one phrase: `GPU 0–7`."""
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
    """Return `NIC of rail 5`, `adapter mlx5_0`, `disk sda`."""
    kind, name = scope.device_kind, scope.device.partition("=")[2]
    if kind == "directory":
        return f"directory {directory_path(name)}"
    rail = name.removeprefix("rail")
    if kind == "nic" and rail != name and rail.isdecimal():
        return f"NIC of rail {rail}"
    return f"{_KINDS.get(kind, kind)} {name}".strip()


def _suffix(label: str) -> str:
    """Return what follows the device: `, hw thermal`, ` to GPU 1`, `, link 2`."""
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
