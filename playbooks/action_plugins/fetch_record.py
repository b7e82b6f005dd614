"""The action `fetch_record`: fetch one record from a host like `ansible.builtin.fetch`, but with a limit on its size.

`fetch` reads a file of any size into the memory of the control node. A record has at most 8 MB (`schemas/documents.py`). A
faulty or hostile host may have a larger file in place of the record, or may send more bytes than the file size that it reports.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail, AnsibleError
from ansible.plugins.action.fetch import ActionModule as Fetch

MAX_BYTES = 8_000_000
MAX_MEMORY_BYTES = 96_000_000
"""Maximum growth of the address space while a record is fetched. Ansible keeps several copies of a record in memory."""


class ActionModule(Fetch):  # type: ignore[misc]
    """The action plugin. It has the arguments of `ansible.builtin.fetch` and handles a missing file in the same way."""

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the result of `fetch`. Raises AnsibleActionFail if the file is larger than MAX_BYTES or not a regular file."""
        source = self._task.args["src"]
        try:
            status = self._execute_remote_stat(source, all_vars=task_vars, follow=True, checksum=False)
        except AnsibleError:
            status = {}  # `fetch` reports why the file cannot be read
        if status.get("exists") and not status.get("isreg"):
            raise AnsibleActionFail(f"{source} is not a regular file: the host's record is not fetched")
        size = status.get("size", 0)
        if not isinstance(size, int) or size > MAX_BYTES:  # a hostile host may report anything as the size
            raise AnsibleActionFail(
                f"{source} has {size} bytes, more than {MAX_BYTES}: this is not a record of Rackproof and is not fetched"
            )
        try:
            with limited():
                result: dict[str, Any] = super().run(tmp, task_vars)
        except MemoryError:
            raise AnsibleActionFail(
                f"{source} is larger than the reported {size} bytes: this is not a record of Rackproof and is not fetched"
            ) from None
        return result


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Limit the memory of this process, which runs only this task, and the size of files that it and its children write."""
    limits = {resource.RLIMIT_FSIZE: MAX_BYTES}
    with contextlib.suppress(OSError):  # without /proc, only the file size is limited, not the memory
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limits[resource.RLIMIT_AS] = pages * resource.getpagesize() + MAX_MEMORY_BYTES
    before = {kind: resource.getrlimit(kind) for kind in limits}
    try:
        for kind, limit in limits.items():
            soft, hard = before[kind]
            ceilings = [value for value in (soft, hard) if value != resource.RLIM_INFINITY]
            resource.setrlimit(kind, (min([limit, *ceilings]), hard))
        yield
    finally:
        for kind, limit_before in before.items():
            resource.setrlimit(kind, limit_before)
