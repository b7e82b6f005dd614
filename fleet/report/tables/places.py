"""Scopes in words: which GPU, which pair of them, which link."""

from __future__ import annotations

from collections.abc import Iterable

_MANY_TAILS = 4


def scope_name(scope: str) -> str:
    """`gpu=3,reason=hw_thermal` as `GPU 3, hw_thermal`."""
    return scopes_name([scope])


def scopes_name(scopes: Iterable[str]) -> str:
    """Several scopes in one phrase: `GPU 0–7`."""
    numbers: dict[tuple[str, str], list[int]] = {}
    others: dict[str, None] = {}
    for scope in scopes:
        first, *rest = scope.split(",")
        kind, _, index = first.partition("=")
        tail = "".join(map(_tail, rest))
        if kind in ("gpu", "cpu") and index.isascii() and index.isdigit() and len(index) < 6:
            numbers.setdefault(({"gpu": "GPU", "cpu": "process"}[kind], tail), []).append(int(index))
        else:
            others[f"{first.replace('=', ' ')}{tail}"] = None
    if len(numbers) > _MANY_TAILS and not others:
        return f"{sum(map(len, numbers.values()))} pairs of GPUs" if _pairs(numbers) else f"{len(numbers)} places"
    return "; ".join([*(f"{kind} {_ranges(found)}{tail}" for (kind, tail), found in numbers.items()), *others])


def _tail(part: str) -> str:
    """What follows the device: `, hw_thermal`, ` to GPU 1`, `, link 2`."""
    kind, _, value = part.partition("=")
    return {"reason": f", {value}", "peer": f" to GPU {value}"}.get(kind, f", {part.replace('=', ' ')}")


def _pairs(numbers: Iterable[tuple[str, str]]) -> bool:
    return all(tail.startswith(" to GPU ") for _, tail in numbers)


def _ranges(numbers: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for found in sorted(set(numbers)):
        if runs and found == runs[-1][-1] + 1:
            runs[-1].append(found)
        else:
            runs.append([found])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
