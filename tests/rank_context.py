"""Fakes of torch's key-value store and of `RankContext`, for tests that run a benchmark without launching ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any


class SharedStore:
    """A store that keeps each value in a file, so that several processes can use it."""

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
    """Fake of `RankContext`. It appends each reported observation to its list `observations`.

    The caller passes this list, and all other attributes that the benchmark reads, to the constructor.
    """

    def report(self, name: str, value: float, *, unit: str, scope: str, **params: Any) -> None:
        self.observations.append(
            {"name": name, "value": value, "unit": unit, "scope": scope, "status": "measured", "params": params}
        )

    def report_absent(self, name: str, *, unit: str, scope: str, status: str, reason: str, **params: Any) -> None:
        self.observations.append(
            {"name": name, "unit": unit, "scope": scope, "status": status, "reason": reason, "params": params}
        )

    def set_phase(self, phase: str) -> None:
        """Do nothing: in these tests no supervisor reads the phase."""
