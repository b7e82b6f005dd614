"""Describe scopes in words: which GPU, which pair of GPUs, which link."""

from __future__ import annotations

from collections.abc import Iterable

_MAX_SUFFIXES = 4
_DEVICES = {"gpu": "GPU", "cpu": "process"}


def describe_scope(scope: str) -> str:
    """Return `gpu=3,reason=hw_thermal` as `GPU 3, hw_thermal`."""
    return describe_scopes([scope])


def describe_scopes(scopes: Iterable[str]) -> str:
    """Return several scopes as one phrase: `GPU 0–7`."""
    indexes: dict[tuple[str, str], list[int]] = {}
    others: dict[str, None] = {}
    for scope in scopes:
        first, *rest = scope.split(",")
        kind, _, index = first.partition("=")
        suffix = "".join(map(_suffix, rest))
        if kind in _DEVICES and index.isascii() and index.isdigit() and len(index) < 6:
            indexes.setdefault((_DEVICES[kind], suffix), []).append(int(index))
        else:
            others[f"{first.replace('=', ' ')}{suffix}"] = None
    if len(indexes) > _MAX_SUFFIXES and not others:
        if all(suffix.startswith(" to GPU ") for _, suffix in indexes):
            return f"{sum(map(len, indexes.values()))} pairs of GPUs"
        return f"{len(indexes)} parts"
    devices = (f"{kind} {_ranges(numbers)}{suffix}" for (kind, suffix), numbers in indexes.items())
    return "; ".join([*devices, *others])


def _suffix(label: str) -> str:
    """Return what follows the device: `, hw_thermal`, ` to GPU 1`, `, link 2`."""
    kind, _, value = label.partition("=")
    return {"reason": f", {value}", "peer": f" to GPU {value}"}.get(kind, f", {label.replace('=', ' ')}")


def _ranges(numbers: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
