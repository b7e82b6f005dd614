"""torchrun with a store that listens on one address: `python -m agent.benchmarks.rendezvous FILE --nnodes=… PROGRAM …`.

torchrun's own rendezvous listen on every address of the host. This one is static: the hosts' order is known, the first keeps
the store, and agents and ranks all use it. What it needs stands in FILE, which only its user can read: not in the arguments,
which everybody on the host can.
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
    gc.disable()  # looking for garbage in what torch makes of itself takes an eighth of the time, and there is none

from torch.distributed import PrefixStore, TCPStore, run  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

import agent.benchmarks.links.pairs  # noqa: F401 - with most of what a rank imports, before ranks are forked from here
from agent.gang.protocol import ExchangeError, listen

BACKEND = "rackproof"
VISIBLE, WITHOUT_CUDA = "CUDA_VISIBLE_DEVICES", "PYTORCH_NVML_BASED_CUDA_CHECK"
PATIENCE = timedelta(minutes=10)
"""With hosts that come late. The supervisors' own is shorter."""


class ClosedRendezvous(RendezvousHandler):
    """The hosts in their known order around one store.

    Args:
        place: `name` of the meeting, `rank` and number of `hosts`, `address` and `port` of the store; the host that keeps it
            listens there, and lets only the `admitted` addresses connect where there are any. Port 0: any.
    """

    use_agent_store = True

    def __init__(self, place: dict[str, Any]) -> None:
        self._place = place

    def get_backend(self) -> str:
        """The name under which torchrun knows it."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Opens the store, or connects to it; torchrun's agents then wait there for each other.

        Raises:
            ExchangeError: it cannot listen.
        """
        place, listener = self._place, None
        address, port = str(place["address"]), int(place["port"])
        if place["rank"] == 0:
            channel = listen(address, port, place["admitted"], what="the ranks' rendezvous")
            port, listener = channel.getsockname()[1], channel.detach()
        store = TCPStore(
            address,
            port,
            is_master=listener is not None,
            timeout=PATIENCE,
            wait_for_workers=False,
            master_listen_fd=listener,
        )
        return RendezvousInfo(
            PrefixStore(place["name"], store), place["rank"], place["hosts"], RendezvousStoreInfo(address, port)
        )

    def is_closed(self) -> bool:
        """Never: ranks are not started a second time."""
        return False

    def set_closed(self) -> None:
        """Nothing to do."""

    def num_nodes_waiting(self) -> int:
        """None: nobody joins later."""
        return 0

    def get_run_id(self) -> str:
        """Under which the ranks keep what they leave each other."""
        return str(self._place["name"])

    def shutdown(self) -> bool:
        """The store goes with the process."""
        return True


def main() -> None:
    """Becomes torchrun."""
    path, *arguments = sys.argv[1:]
    place: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    if place["trains"]:
        importlib.import_module("torch._dynamo")  # which every rank's first optimizer imports
    gc.freeze()  # what importing torch made stays, and Python would look through all of it at the end: half a second
    gc.enable()
    look_up_no_names()
    hide_gpus()

    def create(_: RendezvousParameters) -> RendezvousHandler:
        return ClosedRendezvous(place)

    rendezvous_handler_registry.register(BACKEND, create)
    try:
        run.main([f"--rdzv-backend={BACKEND}", "--rdzv-endpoint=none", f"--rdzv-id={place['name']}", *arguments])
    except ExchangeError as error:
        sys.exit(f"rackproof: {error}")


def hide_gpus() -> None:
    """Has torchrun see no GPU until it forks: newer ones ask for them, and CUDA works in no fork of a process that did."""
    hidden = {VISIBLE: "", WITHOUT_CUDA: "1"}
    shown = {name: os.environ[name] for name in hidden if name in os.environ}
    os.environ |= hidden

    def show() -> None:
        for name in hidden:
            os.environ.pop(name, None)
        os.environ |= shown

    os.register_at_fork(after_in_child=show)


def look_up_no_names() -> None:
    """Keeps this process from asking name servers: every address that it is given is a number.

    torch looks up names for its messages while it makes the store: with a name server that does not answer, that takes 10 s
    (measured with torch 2.13; so 0.01 s).
    """
    with contextlib.suppress(AttributeError):  # glibc's own; another C library has no such switch
        ctypes.CDLL(None).__nss_configure_lookup(b"hosts", b"files")


if __name__ == "__main__":
    main()
