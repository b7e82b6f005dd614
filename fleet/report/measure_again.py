"""The command that measures the hosts of a run again, as the run measured them."""

from __future__ import annotations

import json
import re

from fleet.planning.plan import PROFILES
from fleet.planning.playbook_profiles import PLAYBOOKS
from fleet.report.formatting import clean, shell_word
from schemas.plans import LOCAL_RUN, Plan
from schemas.stages import SOAK

LOCAL_COMMAND = "rackproof run"
_PLAIN_VALUE = re.compile(r"[\w./-]+")


def measure_again(plan: Plan) -> str:
    """Return the command that measures all hosts of the plan again.

    The plan has neither the path of the inventory nor that of a profile of the operator: INVENTORY and PATH stand for them.
    """
    is_shipped = (PROFILES / f"{plan.profile}.yml").exists()
    profile = clean(plan.profile if is_shipped else f"PATH/{plan.profile}.yml")
    if plan.begun_by == LOCAL_RUN:
        return " ".join((LOCAL_COMMAND, "--profile", *map(shell_word, (profile, *_local_options(plan)))))
    playbook = plan.begun_by or ("burnin" if any(stage.name == SOAK for stage in plan.stages) else "acceptance")
    variable = PLAYBOOKS[playbook].variable
    # Ansible splits `name=value` at spaces and quotes of the value. It does not split JSON.
    is_plain = _PLAIN_VALUE.fullmatch(profile)
    setting = f"{variable}={profile}" if is_plain else json.dumps({variable: profile}, ensure_ascii=False)
    return f"ansible-playbook -i INVENTORY playbooks/{playbook}.yml -e {shell_word(setting)}"


def _local_options(plan: Plan) -> list[str]:
    """Return the options of `rackproof run` that choose the GPUs and the criteria of the plan."""
    host = plan.hosts[0]
    options = []
    if not plan.rehearsal and not plan.study:
        count = len(host.devices)
        options += [] if host.count_found else ["--gpus", str(count)]
        if host.count_found or host.devices != tuple(range(count)):
            options += ["--devices", ",".join(map(str, host.devices))]
        options += ["--model", host.gpu_model] if host.gpu_model else []
    return [*options, *(word for name in plan.criteria for word in ("--criteria", name))]
