"""Make the plan of a run. Read the files that the inventory names; with a time budget, select the tests that fit into it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from fleet.criteria_lint.checked_packs import checked_packs
from fleet.inventory.ansible import Variables
from fleet.inventory.manifest_file import read_manifest
from fleet.inventory.waivers_file import read_waivers
from fleet.judge.criteria import model_packs, read_pack, shipped_packs
from fleet.planning.history import StoredRuns, apply_budget
from fleet.planning.plan import make_plan, read_profile, without_unused_benchmarks
from fleet.planning.playbook_profiles import refuse_other_playbook
from fleet.planning.test_selection import refuse_budget
from fleet.records.baseline_store import planned_baseline
from schemas import documents
from schemas.errors import UsageError
from schemas.plans import Plan


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What the operator asks for on the command line, in addition to the inventory."""

    profile: str | None = None
    """Name of a profile, or path of a YAML file. None: rackproof_profile of the inventory, or else `standard`."""
    budget: str | None = None
    """Seconds per host. None: rackproof_budget_s of the inventory; without either, the whole profile runs."""
    history: Path | None = None
    """Directory of earlier runs, used if `stored` is None or returns no run. None: the parent of `run_dir`, if that is set."""
    stored: StoredRuns | None = None
    """Function that reads earlier runs from the history of the fleet (rackproof_history). None: the fleet has no history."""
    run_dir: Path | None = None
    """Directory of the run. None: the plan is only printed."""
    playbook: str | None = None
    """Name of the playbook that runs the plan, a key of PLAYBOOKS. None: it is not known, or it runs only a part of a plan."""


def plan_run(hosts: Mapping[str, Variables], request: PlanRequest, now: datetime) -> Plan:
    """Return the plan of a run of these hosts.

    Raises:
        UsageError: a variable, a file named in the inventory, or an option is invalid.
    """
    first = next(iter(hosts.values()))
    name = request.profile or str(first.get("rackproof_profile", "standard"))
    profile = read_profile(name)
    if request.playbook:
        refuse_other_playbook(profile, name, request.playbook)
    profile = without_unused_benchmarks(profile, hosts)  # a time budget must not be spent on unused ones
    checked_packs(first.get("rackproof_criteria", ()))
    _refuse_unknown_models(hosts)
    run_dir, created = request.run_dir, now.strftime("%Y-%m-%dT%H:%M:%SZ")
    manifest, waivers = first.get("rackproof_manifest"), first.get("rackproof_waivers")
    parts = read_manifest(manifest, hosts) if manifest else ()
    budget = request.budget or first.get("rackproof_budget_s")
    refuse_budget(profile, budget)
    reduced, choice = apply_budget(
        profile,
        hosts,
        budget=budget,
        runs=request.history or (run_dir.parent if run_dir else None),
        run_dir=run_dir,
        now=created,
        stored=request.stored,
    )
    return make_plan(
        reduced,
        hosts,
        run_id=run_dir.name if run_dir else now.strftime("%Y%m%dT%H%M%SZ"),
        nonce=secrets.token_hex(16),
        created=created,
        manifest=parts,
        choice=choice,
        waivers=read_waivers(waivers, hosts) if waivers else (),
        baseline=planned_baseline(first.get("rackproof_baseline"), profile["device"] == "cpu", hosts, run_dir),
        begun_by=request.playbook or "",
    )


def _refuse_unknown_models(hosts: Mapping[str, Variables]) -> None:
    for name, variables in hosts.items():
        model = variables.get("rackproof_gpu_model", "")
        if model and (model not in shipped_packs() or not read_pack(model).gpu_names):
            models = model_packs()
            raise UsageError(
                f"host {name}: unknown rackproof_gpu_model {model}{documents.nearest(model, models, same_letters=True)}: "
                f"choose from {', '.join(models)}"
            )
