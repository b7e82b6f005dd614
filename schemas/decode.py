"""Convert JSON documents to records, which are dataclasses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from schemas.documents import DocumentError
from schemas.records import Culprit, Gpu, Launch, Metric, Observation, Rank, Record, Samples, Snapshot, instance_of
from schemas.semantic_validation import metric_problem, record_problem
from schemas.timeline import soak_from_json
from schemas.trace import Trace

_SAMPLES: Mapping[str, Any] = {"precision": None, "stopped": ""}
_OBSERVATION: Mapping[str, Any] = {"value": None, "reason": "", "params": {}, "samples": None}
_METRIC: Mapping[str, Any] = {"values": {}, "absent": {}}


def record_from_json(document: Mapping[str, Any], *, source: str = "record") -> Record:
    """Return the record in a document that matches record.schema.json.

    Raises:
        DocumentError: the record fails the semantic validation. The message starts with `source`.
    """
    snapshots = [
        (snapshot, tuple(instance_of(Metric, {**_METRIC, **metric}) for metric in snapshot["metrics"]))
        for snapshot in document.get("snapshots", ())
    ]
    problems = (problem for _, metrics in snapshots for metric in metrics if (problem := metric_problem(metric)))
    problem = next(problems, "")
    record = record_from_parts(document, snapshots, map(observation_from_json, document.get("observations", ())))
    if problem := problem or record_problem(record):
        raise DocumentError(f"{source}: {problem}")
    return record


def record_from_parts(
    document: Mapping[str, Any],
    snapshots: Iterable[tuple[Mapping[str, Any], tuple[Metric, ...]]],
    observations: Iterable[Observation],
) -> Record:
    """Return the record of a document that matches record.schema.json, without semantic validation.

    Args:
        document: the record. The other arguments replace its snapshots and observations.
        snapshots: each with its metrics.
        observations: those of the benchmarks.
    """
    parts: dict[str, Any] = {
        "gpus": tuple(Gpu(**gpu) for gpu in document.get("gpus", ())),
        "snapshots": tuple(Snapshot(**{**snapshot, "metrics": metrics}) for snapshot, metrics in snapshots),
        "observations": tuple(observations),
        "launches": tuple(_launch(item) for item in document.get("launches", ())),
    }
    soak = soak_from_json(document["soak"]) if "soak" in document else None
    return Record(**{**document, **parts, "soak": soak})


def _launch(document: Mapping[str, Any]) -> Launch:
    parts: dict[str, Any] = {
        "members": tuple(document["members"]),
        "ranks": tuple(Rank(**rank) for rank in document["ranks"]),
        "culprit": culprit_from_json(document["culprit"]) if "culprit" in document else None,
        "observations": tuple(observation_from_json(item) for item in document.get("observations", ())),
        "timeline": Trace(**document["timeline"]) if "timeline" in document else None,
    }
    return Launch(**{**document, **parts})


def culprit_from_json(document: Mapping[str, Any]) -> Culprit:
    """Return the culprit in a document that matches record.schema.json."""
    return Culprit(**{**document, "hosts": tuple(document["hosts"])})


def observation_from_json(document: Mapping[str, Any]) -> Observation:
    """Return the observation in a document that matches observation.schema.json."""
    observation = object.__new__(Observation)
    fields = {**_OBSERVATION, **document}
    if fields["samples"]:
        fields["samples"] = instance_of(Samples, {**_SAMPLES, **fields["samples"]})
    object.__setattr__(observation, "__dict__", fields)
    return observation
