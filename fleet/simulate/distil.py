"""Real records -> the data file of `rackproof simulate`: of each figure the median, the extremes and the spread between parts.

    python -m fleet.simulate.distil docs/measurements > fleet/simulate/h200-sxm.json

Regenerate it after new measurements; a test compares the file with the records.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fleet.simulate.assumed import ASSUMED
from schemas.catalogue import BENCHMARKS, DURATION
from schemas.scopes import Scope

SCHEMA = "rackproof.simulate/1"
MODEL = "h200-sxm"
FIGURES = ("h200x4-one-host", "h200x4-second-host", "h200x4-beside-references")
"""Runs whose figures are used, four GPUs each: all of them for figures of a GPU, the first for figures of a host.

They are machines of different builds: how far apart they are in what their CPUs have a part in says nothing of hosts of
one build. There the spread is that of one host's repetitions.
"""
HOSTS_OWN = ("dataloader.",)
"""Figures of a GPU that are its host's all the same."""
SMALL = 1 << 20
"""Bytes below which a collective takes as long as its host takes to launch it."""
LEAST, MOST, UNKNOWN = 0.002, 0.02, 0.01
"""Standard deviation of a host's figure, as a share of it: at least, at most, and where it was not repeated."""
READINGS = "h200x4-burnin"
"""The run whose snapshots are taken: the only one in which every collector of today was there."""
APART = ("numa",)
VOLATILE = ("world_size", "devices", "bytes", "free_bytes", "repetitions", "samples_per_second", "replicas", "left_out")
"""Parameters that say how it went, or on how many ranks."""
LEFT_OUT = ("host.kernel.command_line", "storage.disk.serial", "network.address")
"""Readings that name one machine."""
_OVER = [(output, frozenset(output.over)) for entry in BENCHMARKS.values() for output in entry.outputs]

Doc = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the data file."""
    (directory,) = sys.argv[1:] if arguments is None else arguments
    sys.stdout.write(text_of(distil(Path(directory))))
    return 0


def text_of(data: Mapping[str, Any]) -> str:
    """The data file as it is kept: a figure or a family a line, so that a change of it can be read."""
    parts = []
    for key, value in data.items():
        body = _line(value)
        if isinstance(value, list) and value and not isinstance(value[0], str):
            body = "[\n" + ",\n".join(map(_line, value)) + "\n]"
        parts.append(f"{json.dumps(key)}: {body}")
    return "{" + ",\n".join(parts) + "}\n"


def _line(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def distil(directory: Path) -> Doc:
    """What the records under `directory` say, and what they do not (`fleet.simulate.assumed`)."""
    records = [_record(directory, run) for run in FIGURES]
    observation = [
        {**item, "run": run}
        for run, record in enumerate(records)
        for item in record["observations"]
        if item["status"] == "measured"
    ]
    name = records[0]["gpus"][0]["name"]
    return {
        "schema": SCHEMA,
        "model": MODEL,
        "gpu": name,
        "source": f"{name}: the records of the runs named here under docs/measurements of Rackproof's repository",
        "records": [*FIGURES, READINGS],
        "measured_ranks": len(records[0]["gpus"]),
        "software": records[0]["software"],
        "figures": [*_figures(item for item in observation if not _of_curve(item)), *ASSUMED],
        "curves": list(_curves(item for item in observation if _of_curve(item))),
        "readings": list(_readings(_record(directory, READINGS))),
    }


def _record(directory: Path, run: str) -> Doc:
    (path,) = (directory / run / "hosts").glob("*.json")
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _of_curve(item: Doc) -> bool:
    return bool(item["name"].startswith("collective.") and "size_bytes" in item.get("params", {}))


def _settings(item: Doc) -> tuple[tuple[str, Any], ...]:
    over = next((keys for output, keys in _OVER if output.makes(item["name"])), frozenset())
    if item["name"] == DURATION.name:
        over = frozenset({"benchmark"})
    return tuple((key, value) for key, value in sorted(item.get("params", {}).items()) if key in over or key in APART)


def _figures(observations: Iterable[Doc]) -> Iterable[Doc]:
    groups: dict[tuple[Any, ...], list[Doc]] = defaultdict(list)
    for item in observations:
        groups[(item["name"], *_settings(item))].append(item)
    for items in groups.values():
        first = items[0]
        params = {key: value for key, value in first.get("params", {}).items() if key not in VOLATILE}
        result: Doc = {"name": first["name"], "unit": first["unit"], **({"params": params} if params else {})}
        values = [item["value"] for item in items]
        if len(set(map(str, values))) == 1 or isinstance(values[0], bool | str):
            constant = isinstance(values[0], bool | str) or not _of_host(first)
            yield {**result, **({"value": max(values, key=values.count)} if constant else _of_one_host(items))}
        elif _of_host(first):
            yield {**result, **_of_one_host(items)}
        else:
            yield {**result, "spread": spread(values), "parts": len(values), **_samples(items)}


def _of_host(item: Doc) -> bool:
    return bool(item["scope"] == "host" or item["name"].startswith(HOSTS_OWN))


def _of_one_host(items: Sequence[Doc]) -> Doc:
    """A host's figure as the first of the runs has it, with the spread of its repetitions."""
    first = [item for item in items if item["run"] == items[0]["run"]]
    if not isinstance(first[0]["value"], float):
        return {"value": first[0]["value"]}
    return {"spread": _repeated(first), "parts": len(first), **_samples(first)}


def _repeated(items: Sequence[Doc]) -> list[float]:
    """As `spread`, of the repetitions of one figure: half the 95 % interval of its median stands for a deviation."""
    median = statistics.median(item["value"] for item in items)
    precision = items[0].get("samples", {}).get("precision") or UNKNOWN
    sigma = abs(median) * min(max(precision, LEAST), MOST)
    return [_short(value) for value in (median, median - 2 * sigma, median + 2 * sigma, sigma)]


def spread(values: Sequence[float]) -> list[float]:
    """Median, least, greatest, and the standard deviation between parts, in the figure's unit."""
    result = (statistics.median(values), min(values), max(values), statistics.stdev(values) if len(values) > 1 else 0.0)
    return [_short(value) for value in result]


def _samples(items: Sequence[Doc]) -> Doc:
    """How the value of a part came about, as one of the records has it; extremes as shares of the value."""
    result = next((item for item in items if item.get("samples")), None)
    if result is None or not result["value"]:
        return {}
    samples = dict(result["samples"])
    samples.pop("p50")
    for key in ("min", "max"):
        samples[key] = round(samples[key] / result["value"], 4)
    for key in ("cv", "precision"):
        if key in samples:
            samples[key] = _short(samples[key], 3)
    return {"samples": samples}


def _curves(observations: Iterable[Doc]) -> Iterable[Doc]:
    """Latency of each operation by its size, and the factor between algorithm and bus bandwidth."""
    groups: dict[tuple[str, str, str], dict[int, list[Doc]]] = defaultdict(lambda: defaultdict(list))
    for item in observations:
        _, op, kind = item["name"].split(".")
        groups[(op, item["params"]["placement"], kind)][item["params"]["size_bytes"]].append(item)
    for (op, placement, kind), sizes in groups.items():
        if kind not in ("latency", "graph_latency"):
            continue
        points = [
            [size, *(_repeated(items[:1]) if size < SMALL else spread([item["value"] for item in items]))]
            for size, items in sorted(sizes.items())
        ]
        result: Doc = {"op": op, "placement": placement, "kind": kind, "points": points}
        if kind == "latency":
            result["factor"] = _factor(groups[(op, placement, "busbw")], groups[(op, placement, "algbw")])
            how = {key: [sizes[size][0]["params"].get(key, "") for size in sorted(sizes)]
                   for key in ("algorithm", "protocol")}  # fmt: skip
            result |= {key: _runs(values) for key, values in how.items()}
        result["samples"] = _samples(sizes[max(sizes)]).get("samples")
        result["params"] = {key: sizes[max(sizes)][0]["params"][key] for key in ("dtype", "backend")}
        yield result


def _factor(busbw: Mapping[int, list[Doc]], algbw: Mapping[int, list[Doc]]) -> float:
    size = max(busbw)
    return float(round(busbw[size][0]["value"] / algbw[size][0]["value"], 4))


def _runs(values: Sequence[str]) -> list[list[Any]]:
    """`[[count, value], …]` of neighbours that are alike."""
    result: list[list[Any]] = []
    for value in values:
        if result and result[-1][1] == value:
            result[-1][0] += 1
        else:
            result.append([1, value])
    return result


def _readings(record: Doc) -> Iterable[Doc]:
    """Return each collector's readings in the snapshots before, during and after, with one GPU standing for all."""
    phases = {"before": record["snapshots"][0], "during": None, "after": record["snapshots"][-1]}
    phases["during"] = next(taken for taken in record["snapshots"] if taken["phase"] == "during")
    pci = {_sysfs(gpu["pci_bus_id"]): gpu["index"] for gpu in record["gpus"]}
    texts = {phase: {metric["name"]: metric for metric in taken["metrics"]} for phase, taken in phases.items() if taken}
    for name, metric in texts["before"].items():
        if name in LEFT_OUT:
            continue
        result: Doc = {"name": name, "unit": metric["unit"]}
        for phase, families in texts.items():
            if name in families:
                result[phase] = _family(families[name], pci)
        if result.get("after") == result["before"]:
            result["after"] = "before"
        if result.get("during") == result["before"]:
            result["during"] = "before"
        yield result


def _family(metric: Doc, pci: Mapping[str, int]) -> Doc:
    """Scope -> value; `gpu=*` and `pci=*` stand for all GPUs, with `[least, greatest]` where theirs differ."""
    result: Doc = {}
    for kind in ("values", "absent"):
        merged: dict[str, list[Any]] = defaultdict(list)
        for scope, value in metric.get(kind, {}).items():
            merged[_general(scope, pci)].append(value)
        if merged:
            result[kind] = {scope: _one(values, scope) for scope, values in merged.items()}
    return result


def _general(scope: str, pci: Mapping[str, int]) -> str:
    parsed = Scope.parse(scope)
    if parsed.device_kind == "gpu":
        return f"gpu=*,{parsed.kind}=*" if parsed.kind in ("peer", "link") else parsed.on("gpu=*")
    return parsed.on("pci=*") if parsed.get("pci") in pci else scope


def _one(values: Sequence[Any], scope: str) -> Any:
    if len(set(map(str, values))) == 1 or "*" not in scope or isinstance(values[0], bool | str):
        return values[0]
    return [min(values), max(values)]


def _sysfs(bus_id: str) -> str:
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _short(value: float, digits: int = 6) -> float:
    short = float(f"{value:.{digits}g}")
    return int(short) if short == int(short) else short


if __name__ == "__main__":
    sys.exit(main())
