"""The action `read_bmcs`: run `rackproof bmc` on the control node, with the accounts of the BMCs on its standard input.

This is not a module, because Ansible writes the arguments of a module to a temporary file if it does not use pipelining.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from typing import Any

from ansible.plugins.action import ActionBase

GROUP = "gpu_hosts"
NAMES = tuple(f"rackproof_bmc_{name}" for name in ("address", "protocol", "user", "password", "verify", "ca"))
TIMEOUT_S = 3600
"""Time limit for reading all BMCs. `rackproof bmc` has its own deadline for each BMC."""


class ActionModule(ActionBase):  # type: ignore[misc]
    """The action plugin. Arguments: `command` (list of words), and `background` (do not wait for the command to end)."""

    _VALID_ARGS = frozenset({"command", "background"})
    _requires_connection = False

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the exit code and the output of the command (without secrets); with `background`, only the message `started`."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        command = [str(word) for word in self._task.args["command"]]
        text = json.dumps(_accounts(task_vars or {})).encode()
        if self._task.args.get("background") in (True, "True", "true"):
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            if process.stdin:
                with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
                    stdin.write(text)
            return {**result, "msg": "started"}
        try:
            done = subprocess.run(command, input=text, capture_output=True, check=False, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return {**result, "failed": True, "msg": f"the BMCs were not read within {TIMEOUT_S} s"}
        output = (done.stdout + done.stderr).decode(errors="replace").splitlines()
        return {**result, "rc": done.returncode, "failed": done.returncode != 0, "msg": output}


def _accounts(task_vars: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return host -> its variables in NAMES, for the hosts that have a BMC address in the inventory."""
    hostvars, accounts = task_vars["hostvars"], {}
    for host in task_vars["groups"].get(GROUP, ()):
        variables = hostvars[host]
        if variables.get(NAMES[0]):
            accounts[str(host)] = {name: _plain(variables[name]) for name in NAMES if name in variables}
    return accounts


def _plain(value: Any) -> Any:
    """Convert a variable of Ansible, which may be a tagged or vault-encrypted object, to a value that JSON can represent."""
    return value if isinstance(value, bool) or value is None else str(value)
