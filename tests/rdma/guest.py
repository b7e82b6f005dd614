"""Run in a virtual machine of `machines.py`: do what the test asks for.

`guest.py HOST DIRECTORY`: DIRECTORY is shared with the test and with the other machines. For each request N.json in it, the
machine runs the shell command for its host, reads its ports as a snapshot does, or measures verbs as a rank does, and writes the
result to N.HOST.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from agent.benchmarks.links import verbs
from agent.sampling.snapshot import take_snapshot
from collectors import COLLECTORS, CollectorOptions
from schemas.records import to_json

POLL_S = 0.1
OF_PORTS = ("infiniband", "network", "wiring", "optics")
"""The collectors that read ports."""


class SharedStore:
    """The store of a launch, as files that all machines see."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(exist_ok=True)

    def _path(self, key: str) -> Path:
        return self._directory / key.replace("/", "%")

    def set(self, key: str, value: str) -> None:
        write(self._path(key), value)

    def get(self, key: str) -> bytes:
        return self._path(key).read_bytes()

    def check(self, keys: list[str]) -> bool:
        return all(self._path(key).exists() for key in keys)


class Recorder(SimpleNamespace):
    """What a benchmark uses of its rank's context. It keeps the observations."""

    def report(self, name: str, value: float, *, unit: str, scope: str, **params: Any) -> None:
        self.observations.append(
            {"name": name, "value": value, "unit": unit, "scope": scope, "status": "measured", "params": params}
        )

    def report_absent(self, name: str, *, unit: str, scope: str, status: str, reason: str, **params: Any) -> None:
        self.observations.append(
            {"name": name, "unit": unit, "scope": scope, "status": status, "reason": reason, "params": params}
        )

    def set_phase(self, phase: str) -> None:
        print(f"{time.monotonic():.1f} {phase}", flush=True)


def write(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.rename(path)


def answer(host: str, directory: Path, number: int, request: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a request."""
    if "stage" in request:
        return {"observations": measure(host, directory, number, request)}
    if command := request.get("commands", {}).get(host):
        subprocess.run(["/bin/sh", "-exc", command], check=True)
    if "snapshot" not in request:
        return {}
    readers = [COLLECTORS[name](CollectorOptions(full_snapshot=True)) for name in OF_PORTS]
    return to_json(take_snapshot(readers, stage="preflight", phase="before")[0])


def measure(host: str, directory: Path, number: int, request: dict[str, Any]) -> list[dict[str, Any]]:
    work = directory / f"{number}.{host}"
    work.mkdir()
    write(work / "request.json", json.dumps(request))
    context = Recorder(
        work=work, stage=request["stage"], node=request["members"].index(host), is_reporting_rank=True, kind="cpu",
        devices=(0,), store=SharedStore(directory / f"{number}.store"), observations=[], timeout_s=120.0,
        heartbeat=SimpleNamespace(record_progress=lambda: None),
    )  # fmt: skip
    verbs.run(context, request["settings"])  # type: ignore[arg-type]
    return list(context.observations)


def main(host: str, directory: Path) -> None:
    write(directory / f"ready.{host}", "")
    number = 0
    while True:
        path = directory / f"{number}.json"
        if not path.exists():
            time.sleep(POLL_S)
            continue
        request = json.loads(path.read_text(encoding="utf-8"))
        if request.get("end"):
            return
        write(directory / f"{number}.{host}.json", json.dumps(answer(host, directory, number, request)))
        number += 1


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
