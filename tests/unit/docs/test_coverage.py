"""Test that docs/coverage.md names only existing observations: figures of benchmarks and readings of collectors."""

from __future__ import annotations

import fnmatch
import itertools
import re

import pytest

from schemas.catalogue import BENCHMARKS, outputs
from schemas.readings import READINGS
from tests import ROOT

INLINE = re.compile(r"`([^`\n]+)`")
NAME = re.compile(r"[a-z][a-z0-9_]*(?:\.(?:\*|[a-z0-9_]+|\{[a-z0-9_,]+\}))+")
FILE_SUFFIXES = (".yaml", ".json", ".md", ".py")
KNOWN = {*READINGS, *(output.name for entry in BENCHMARKS for output in outputs(entry, "gpu"))}


def expand(pattern: str) -> list[str]:
    """Return `stress.power` and `stress.clock` for `stress.{power,clock}`.

    `*` stays in the names. So do braces around a single word, as in `{op}`: they stand for a parameter.
    """
    pieces = re.split(r"\{([a-z0-9_]+(?:,[a-z0-9_]+)+)\}", pattern)
    choices = [piece.split(",") if index % 2 else [piece] for index, piece in enumerate(pieces)]
    return ["".join(choice) for choice in itertools.product(*choices)]


def named_observations(text: str) -> list[str]:
    """Return the names of observations that are in backticks in a text, with their braces expanded by `expand`."""
    patterns = (span for span in INLINE.findall(text) if NAME.fullmatch(span) and not span.endswith(FILE_SUFFIXES))
    return [name for pattern in patterns for name in expand(pattern)]


def is_known(name: str) -> bool:
    return any(fnmatch.fnmatchcase(known, name) for known in KNOWN)


def test_observations_named_on_the_page_exist() -> None:
    names = named_observations((ROOT / "docs" / "coverage.md").read_text(encoding="utf-8"))
    assert len(names) > 100
    assert [name for name in names if not is_known(name)] == []


@pytest.mark.parametrize(
    "text", ["`gpu.inforom.valed`", "`stress.{power,noise}`", "`pulses.*`", "`collective.{op}.speed`"]
)
def test_unknown_name_is_detected(text: str) -> None:
    assert any(not is_known(name) for name in named_observations(text))
