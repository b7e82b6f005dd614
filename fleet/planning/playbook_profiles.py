"""Check that the playbook of a run runs the stages of its profile. Otherwise the run could only end incomplete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schemas.errors import UsageError
from schemas.stages import BENCHMARK, GANG, SOAK


@dataclass(frozen=True, kw_only=True)
class Playbook:
    """What a playbook runs, and the inventory variable that names its profile."""

    stages: frozenset[str]
    variable: str
    has_study: bool = False
    """Whether its profiles are scaling studies."""

    def fits(self, profile: Mapping[str, Any]) -> bool:
        """Return whether the playbook runs all stages of the profile, and the profile has the soak that the playbook needs."""
        stages = set(profile["stages"])
        has_needed = SOAK in stages or SOAK not in self.stages
        return stages <= self.stages and has_needed and self.has_study == ("study" in profile)


PLAYBOOKS = {
    "acceptance": Playbook(stages=frozenset({BENCHMARK, GANG}), variable="rackproof_profile"),
    "burnin": Playbook(stages=frozenset({SOAK, GANG}), variable="rackproof_soak_profile"),
    "revalidate": Playbook(stages=frozenset({BENCHMARK, GANG}), variable="rackproof_revalidate_profile"),
    "scaling": Playbook(stages=frozenset({GANG}), variable="rackproof_study", has_study=True),
}
"""Name of each playbook that measures -> what it runs. The first one that fits a profile is suggested for this profile."""


def refuse_other_playbook(profile: Mapping[str, Any], given: str, name: str) -> None:
    """Raise UsageError if playbooks/`name`.yml does not run the profile. The message names the right playbook and variable.

    `given`: name or path of the profile, as the operator wrote it.
    """
    playbook = PLAYBOOKS[name]
    if playbook.fits(profile):
        return
    runs = "scaling studies" if playbook.has_study else f"the stages {' and '.join(sorted(playbook.stages))}"
    has = "is a scaling study" if "study" in profile else f"has {' and '.join(sorted(profile['stages']))}"
    right = next((item for item, other in PLAYBOOKS.items() if other.fits(profile)), "")
    remedy = (
        f"run playbooks/{right}.yml with {PLAYBOOKS[right].variable}={given}"
        if right
        else "divide it into one profile for playbooks/burnin.yml and one for playbooks/acceptance.yml"
    )
    overrides = "" if name == "acceptance" else " (and leave out -e rackproof_profile)"
    raise UsageError(
        f"playbooks/{name}.yml runs {runs}, but the profile {given} {has}: {remedy}, or name another profile in "
        f"{playbook.variable}{overrides}"
    )
