"""Test the table of report formats and how their files are written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tomllib

from fleet.report.formats import FLAGS, FORMATS, Format
from fleet.report.stream import write_stream
from tests import ROOT


@pytest.mark.parametrize("name", FORMATS)
def test_format_uses_only_defined_flags_and_extras(name: str) -> None:
    output = FORMATS[name]
    assert {*output.variants, *filter(None, [output.only_with])} <= FLAGS.keys()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert not output.library or any(requirement.startswith(output.library) for requirement in extras[output.extra])


def test_possible_flags_are_all_combinations_of_the_variants() -> None:
    output = Format(render=lambda source: "", variants=("--a", "--b"))
    assert list(output.possible_flags()) == [(), ("--a",), ("--b",), ("--a", "--b")]


def test_text_and_bytes_are_written_unchanged(tmp_path: Path) -> None:
    write_stream(tmp_path / "file", ["µ\r\n", b"\x00\xff", "end"])
    assert (tmp_path / "file").read_bytes() == "µ\r\n".encode() + b"\x00\xffend"


def test_interrupted_write_keeps_the_old_file(tmp_path: Path) -> None:
    def pieces() -> Iterator[str]:
        yield "new"
        raise RuntimeError("interrupted")

    (tmp_path / "file").write_text("old")
    with pytest.raises(RuntimeError, match="interrupted"):
        write_stream(tmp_path / "file", pieces())
    assert (tmp_path / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
