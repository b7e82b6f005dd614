"""Test that the files and functions listed in tests/mutate.py and tests/conftest.py exist."""

from __future__ import annotations

import pytest

from tests import ROOT, conftest, mutate


@pytest.mark.parametrize("name", mutate.SCOPES)
def test_targets_and_tests_of_the_mutation_tests_exist(name: str) -> None:
    scope = mutate.SCOPES[name]
    assert [target for target in scope.targets if not (ROOT / target.partition(":")[0]).is_file()] == []
    assert [target for target in scope.targets if ":" in target and not mutate.mutants(target)] == []
    assert [test for test in scope.tests if not (ROOT / "tests" / "unit" / f"{test}.py").is_file()] == []


def test_slowest_test_files_exist() -> None:
    assert [name for name in conftest.SLOWEST_FILES if not (ROOT / "tests" / f"{name}.py").is_file()] == []
