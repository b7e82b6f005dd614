"""Test that a playbook refuses a profile whose stages it does not run, and names the right playbook and variable."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from fleet.planning.plan import PROFILES, read_profile
from fleet.planning.playbook_profiles import PLAYBOOKS, refuse_other_playbook
from schemas.errors import UsageError
from schemas.stages import BENCHMARK, GANG, SOAK
from tests import ROOT
from tests.unit.fleet.planning.test_plan_edges import profile_with
from tests.unit.playbooks.test_nothing_done import play

RIGHT = {
    "acceptance": {"extended", "rehearsal", "revalidate", "revalidate-rehearsal", "smoke", "standard"},
    "burnin": {"soak", "soak-rehearsal"},
    "revalidate": {"extended", "rehearsal", "revalidate", "revalidate-rehearsal", "smoke", "standard"},
    "scaling": {"scaling", "scaling-rehearsal"},
}
"""Playbook -> the shipped profiles that it runs."""


def roles_of(playbook: str, tag: str = "") -> Iterator[str]:
    """Yield the roles of the plays of a playbook and of the playbooks that it imports. `tag`: only of plays with this tag."""
    for item in yaml.safe_load((ROOT / "playbooks" / playbook).read_text()):
        if "import_playbook" in item:
            yield from roles_of(item["import_playbook"], tag)
        elif not tag or tag in item["tags"]:
            yield from (role["role"] for role in item.get("roles", ()))


@pytest.mark.parametrize("name", PLAYBOOKS)
def test_stages_of_a_playbook_are_those_of_its_roles(name: str) -> None:
    assert PLAYBOOKS[name].stages == {BENCHMARK, GANG, SOAK} & set(roles_of(f"{name}.yml"))


@pytest.mark.parametrize("profile", sorted(path.stem for path in PROFILES.glob("*.yml")))
@pytest.mark.parametrize("playbook", PLAYBOOKS)
def test_shipped_profile_is_refused_by_exactly_the_playbooks_that_do_not_run_it(playbook: str, profile: str) -> None:
    document = read_profile(profile)
    if profile in RIGHT[playbook]:
        refuse_other_playbook(document, profile, playbook)
        return
    right = next(name for name, profiles in RIGHT.items() if profile in profiles)
    with pytest.raises(UsageError) as refused:
        refuse_other_playbook(document, profile, playbook)
    assert str(refused.value).startswith(f"playbooks/{playbook}.yml runs ")
    assert f"run playbooks/{right}.yml with {PLAYBOOKS[right].variable}={profile}, or name another profile in" in str(
        refused.value
    )


def test_profile_that_no_playbook_runs_is_refused_by_each(tmp_path: Path) -> None:
    document = read_profile(str(profile_with(tmp_path, "benchmarks: {gemm: {}}")))
    document["stages"]["soak"] = document["stages"]["benchmark"]
    for playbook in PLAYBOOKS:
        with pytest.raises(
            UsageError, match=r"has benchmark and soak: divide it into one profile for playbooks/burnin.yml"
        ):
            refuse_other_playbook(document, "mine.yml", playbook)


@pytest.mark.parametrize(
    ("playbook", "variable", "message"),
    [
        (
            "acceptance",
            "rackproof_profile=soak-rehearsal",
            "run playbooks/burnin.yml with rackproof_soak_profile=soak-reh",
        ),
        ("burnin", "rackproof_profile=rehearsal", "(and leave out -e rackproof_profile)"),
        (
            "burnin",
            "rackproof_soak_profile=rehearsal",
            "run playbooks/acceptance.yml with rackproof_profile=rehearsal, or",
        ),
        (
            "revalidate",
            "rackproof_revalidate_profile=soak-rehearsal",
            "run playbooks/burnin.yml with rackproof_soak_pro",
        ),
        ("scaling", "rackproof_study=smoke", "playbooks/scaling.yml runs scaling studies, but the profile smoke has "),
    ],
)
def test_playbook_refuses_a_profile_that_it_does_not_run_before_the_run_begins(
    tmp_path: Path, playbook: str, variable: str, message: str
) -> None:
    done = play(tmp_path, playbook, "-e", "rackproof_run_id=r1", "-e", variable)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in " ".join(done.stdout.split())
    assert not (tmp_path / "runs/r1/plan.json").exists()
