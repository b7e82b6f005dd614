"""The action `fetch_record`: `ansible.builtin.fetch` of one record, refused before it is copied if it is too large.

`fetch` reads a file of any size into the memory of the control node. A record has at most 8 MB (`schemas/documents.py`).
A faulty or hostile host may have a file of any size in its place.
"""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleActionFail, AnsibleError
from ansible.plugins.action.fetch import ActionModule as Fetch

MAX_BYTES = 8_000_000


class ActionModule(Fetch):  # type: ignore[misc]
    """Takes the arguments of `ansible.builtin.fetch`. A missing file is left to `fetch`."""

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the result of `fetch`. Raises AnsibleActionFail if the file is larger than MAX_BYTES, or no regular file."""
        source = self._task.args["src"]
        try:
            status = self._execute_remote_stat(source, all_vars=task_vars, follow=True, checksum=False)
        except AnsibleError:
            status = {}  # `fetch` reports why the file cannot be read
        if status.get("exists") and not status.get("isreg"):
            raise AnsibleActionFail(f"{source} is not a regular file: the host's record is not fetched")
        size = status.get("size", 0)
        if not isinstance(size, int) or size > MAX_BYTES:  # the host's answer, whatever it is
            raise AnsibleActionFail(
                f"{source} has {size} bytes, more than {MAX_BYTES}: this is no record of Rackproof and is not fetched"
            )
        result: dict[str, Any] = super().run(tmp, task_vars)
        return result
