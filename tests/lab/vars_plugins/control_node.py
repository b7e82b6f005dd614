"""Run the modules of the control node with `control_python.py`, which needs a fifth of the CPU time.

`playbooks/host_vars/localhost.yml` sets the interpreter of the control node and precedes the variables of an inventory. This
vars plugin comes after it (`ANSIBLE_VARS_ENABLED` in `tests/conftest.py` has the order).
"""

from pathlib import Path

from ansible.plugins.vars import BaseVarsPlugin

CONTROL_PYTHON = Path(__file__).absolute().parents[1] / "control_python.py"


class VarsModule(BaseVarsPlugin):
    """Sets `ansible_python_interpreter` of localhost."""

    REQUIRES_ENABLED = True

    def get_vars(self, loader, path, entities):
        """Return the variables of the hosts or groups."""
        entities = entities if isinstance(entities, list) else [entities]
        of_localhost = {"ansible_python_interpreter": str(CONTROL_PYTHON), "ansible_pipelining": True}
        return of_localhost if any(entity.name == "localhost" for entity in entities) else {}
