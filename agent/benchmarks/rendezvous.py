"""torchrun with a store that listens on one address: `python -m agent.benchmarks.rendezvous FILE --nnodes=… PROGRAM …`.

torchrun's own rendezvous backends listen on every address of the host. This backend listens on one address only, because the
hosts and their order are known: the first host runs the store, and all torchrun agents and ranks use it. The parameters are
in FILE, not in the arguments: only the owner can read FILE, but every user of the host can read the arguments.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    gc.disable()  # garbage collection would take an eighth of torch's import time, and would free nothing

from torch.distributed import PrefixStore, TCPStore, run  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

import agent.benchmarks.links.pairs  # noqa: F401 - imports most of what a rank needs, before this process forks the ranks
from agent.gang.protocol import GangError
from agent.gang.transport import listen

BACKEND = "rackproof"
VISIBLE, WITHOUT_CUDA = "CUDA_VISIBLE_DEVICES", "PYTORCH_NVML_BASED_CUDA_CHECK"
TIMEOUT = timedelta(minutes=10)
"""How long to wait for late hosts. If a launcher fails within OWN_FAILURE_S (agent.gang.monitor), before any rank has started,
the supervisor blames the launcher's host. TIMEOUT is longer than OWN_FAILURE_S. So no host is blamed because it waited in vain
for a late host."""


class StaticRendezvous(RendezvousHandler):
    """Connects the hosts through one store. The hosts and their order are known beforehand.

    Args:
        config: `name` of the launch, `rank` of this host, number of `hosts`, `address` and `port` of the store (0: any port).
            Host 0 listens on this address. If the list `admitted` is not empty, only its addresses and host 0 may connect.
    """

    use_agent_store = True

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    def get_backend(self) -> str:
        """Return the name by which torchrun selects this rendezvous."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the store, or connect to it; torchrun's agents then use the store to wait for each other.

        Raises:
            GangError: this host cannot listen on the store's address.
        """
        config, descriptor = self._config, None
        address, port = str(config["address"]), int(config["port"])
        if config["rank"] == 0:
            listener = listen(address, port, config["admitted"], purpose="the ranks' rendezvous")
            port, descriptor = listener.getsockname()[1], listener.detach()
        store = TCPStore(
            address,
            port,
            is_master=descriptor is not None,
            timeout=TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )
        return RendezvousInfo(
            PrefixStore(config["name"], store), config["rank"], config["hosts"], RendezvousStoreInfo(address, port)
        )

    def is_closed(self) -> bool:
        """Return False: ranks are not restarted."""
        return False

    def set_closed(self) -> None:
        """Do nothing."""

    def num_nodes_waiting(self) -> int:
        """Return 0: no host joins later."""
        return 0

    def get_run_id(self) -> str:
        """Return the prefix of the ranks' keys in the store."""
        return str(self._config["name"])

    def shutdown(self) -> bool:
        """Do nothing: the store closes when the process exits."""
        return True


def main() -> None:
    """Run torchrun in this process."""
    path, *arguments = sys.argv[1:]
    config: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    if config["trains"]:
        # The first optimizer of each rank needs this module. Before the ranks are forked, one import serves them all.
        importlib.import_module("torch._dynamo")
    gc.freeze()  # otherwise the garbage collector would visit the objects that the import of torch created
    gc.enable()
    disable_name_lookups()
    hide_gpus_until_fork()

    def create(_: RendezvousParameters) -> RendezvousHandler:
        return StaticRendezvous(config)

    rendezvous_handler_registry.register(BACKEND, create)
    try:
        run.main([f"--rdzv-backend={BACKEND}", "--rdzv-endpoint=none", f"--rdzv-id={config['name']}", *arguments])
    except GangError as error:
        sys.exit(f"rackproof: {error}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # Python would spend a tenth of a second of CPU time, or more, on removing the objects of torch


def hide_gpus_until_fork() -> None:
    """Hide the GPUs from this process until it forks the ranks.

    The torchrun of newer versions of torch queries the GPUs. If it did so here, CUDA would fail in the forked ranks.
    """
    hidden = {VISIBLE: "", WITHOUT_CUDA: "1"}
    before = {name: os.environ[name] for name in hidden if name in os.environ}
    os.environ |= hidden

    def restore() -> None:
        for name in hidden:
            os.environ.pop(name, None)
        os.environ |= before

    os.register_at_fork(after_in_child=restore)


def disable_name_lookups() -> None:
    """Keep this process from querying name servers. It needs none, because all addresses that it uses are numeric.

    While torch opens the store, it looks up host names for its log messages. If the name server does not answer, opening the
    store takes 10 s (measured with torch 2.13); without look-ups it takes 0.01 s.
    """
    with contextlib.suppress(AttributeError):  # only glibc has this function
        ctypes.CDLL(None).__nss_configure_lookup(b"hosts", b"files")


if __name__ == "__main__":
    main()
