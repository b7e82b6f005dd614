"""What a benchmark uses of its rank, without a launch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any


class SharedStore:
    """The store of a launch, as files that all hosts see."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(exist_ok=True)

    def _path(self, key: str) -> Path:
        return self._directory / key.replace("/", "%")

    def set(self, key: str, value: str) -> None:
        path = self._path(key)
        part = path.with_name(f"{path.name}.part")
        part.write_text(value, encoding="utf-8")
        part.rename(path)

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
        """Ranks show it in their heartbeats."""
