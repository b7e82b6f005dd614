"""Test texts of hosts in shell commands of the report and of RMA packages."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.report.formatting import clean, shell_word
from tests import ROOT


@settings(max_examples=300)
@given(st.text(st.sampled_from("a'\"\\ $`;\x1b[]m\x07\n\r\u202e\x9b(){}|&"), max_size=40))
def test_text_of_a_host_is_one_word_of_a_shell_command_and_stays_so_if_the_command_is_cleaned(text: str) -> None:
    command = f"nvidia-smi -i {shell_word(text)}"
    assert shlex.split(command) == ["nvidia-smi", "-i", clean(text)]
    assert clean(command) == command


@pytest.mark.parametrize("package", ["diagnosis", "report", "rma"])
def test_texts_of_hosts_are_quoted_only_by_the_function_that_also_cleans_them(package: str) -> None:
    uses = [path for path in (ROOT / "fleet" / package).rglob("*.py") if "shlex" in path.read_text(encoding="utf-8")]
    assert uses == ([ROOT / "fleet" / "report" / "formatting.py"] if package == "report" else [])
