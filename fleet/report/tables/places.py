"""Scopes in words: which GPU, which pair of them, which link."""

from __future__ import annotations

from collections.abc import Iterable

from schemas.scopes import Scope

_MANY_TAILS = 4
_DEVICES = {"gpu": "GPU", "cpu": "process"}


def scope_name(scope: str) -> str:
    """`gpu=3,reason=hw_thermal` as `GPU 3, hw_thermal`."""
    return scopes_name([scope])


def scopes_name(scopes: Iterable[str]) -> str:
    """Several scopes in one phrase: `GPU 0–7`."""
    numbers: dict[tuple[str, str], list[int]] = {}
    others: dict[str, None] = {}
    pairs = True
    for scope in scopes:
        parsed = Scope.parse(scope)
        tail = "".join(map(_tail, parsed.below.split(","))) if parsed.below else ""
        pairs = pairs and parsed.kind == "peer"
        if parsed.device_kind in _DEVICES and parsed.index is not None:
            numbers.setdefault((_DEVICES[parsed.device_kind], tail), []).append(parsed.index)
        else:
            others[f"{parsed.device.replace('=', ' ')}{tail}"] = None
    if len(numbers) > _MANY_TAILS and not others:
        return f"{sum(map(len, numbers.values()))} pairs of GPUs" if pairs else f"{len(numbers)} places"
    return "; ".join([*(f"{kind} {_ranges(found)}{tail}" for (kind, tail), found in numbers.items()), *others])


def _tail(part: str) -> str:
    """What follows the device: `, hw_thermal`, ` to GPU 1`, `, link 2`."""
    kind, _, value = part.partition("=")
    return {"reason": f", {value}", "peer": f" to GPU {value}"}.get(kind, f", {part.replace('=', ' ')}")


def _ranges(numbers: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for found in sorted(set(numbers)):
        if runs and found == runs[-1][-1] + 1:
            runs[-1].append(found)
        else:
            runs.append([found])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
