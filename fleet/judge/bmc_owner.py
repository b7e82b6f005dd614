"""Find hosts whose inventory names the BMC of another host, so that no part is blamed for a wrong address."""

from __future__ import annotations

from collections.abc import Sequence

from fleet.judge.bmc import CRITERION, GPU_SERIAL, HOST_SERIAL, READABLE, SOURCE, is_serial, reported_serials
from fleet.judge.host_view import HostView
from schemas.readings import BMC
from schemas.records import MEASURED
from schemas.reports import FAIL, PASS, SEVERITY, Verdict, VerdictKind
from schemas.scopes import HOST
from schemas.stages import PREFLIGHT

ACTION = "configure"


class HostSerials:
    """For each serial, the hosts that report it as their own or as that of one of their GPUs."""

    def __init__(self) -> None:
        self._hosts: dict[str, set[str]] = {}
        """Serial in lower case -> hosts."""

    def add(self, view: HostView) -> None:
        """Add the serials of a host."""
        for serial in _own_serials(view):
            self._hosts.setdefault(serial, set()).add(view.host.name)

    def update(self, other: HostSerials) -> None:
        """Add the serials of other hosts."""
        for serial, hosts in other._hosts.items():
            self._hosts.setdefault(serial, set()).update(hosts)

    def owner_of_bmc(self, view: HostView) -> str:
        """Return the other host that the BMC in the inventory of this host belongs to; empty if it may be the host's own BMC.

        It belongs to another host under two conditions: this host reports no serial of the BMC, and exactly one other host does.
        The serial of a chassis does not show another host, because several hosts may be in one chassis.
        """
        reported = {serial.casefold() for serial in reported_serials(view, GPU_SERIAL, "bmc.system.serial")}
        chassis = {serial.casefold() for serial in reported_serials(view, "bmc.chassis.serial")}
        if _own_serials(view) & (reported | chassis):
            return ""
        owners = {host for serial in reported for host in self._hosts.get(serial, ())} - {view.host.name}
        return owners.pop() if len(owners) == 1 else ""


def _own_serials(view: HostView) -> set[str]:
    """Return the serials that a host reports for itself and its GPUs, in lower case."""
    system = [str(item.value) for item in view.observations[HOST_SERIAL] if item.status == MEASURED]
    return {serial.casefold() for serial in (*system, *(gpu.serial for gpu in view.gpus)) if is_serial(serial)}


def with_owner_of_bmc(view: HostView, verdicts: Sequence[Verdict], serials: HostSerials) -> list[Verdict]:
    """Return the verdicts on a host. If its BMC belongs to another host, one failure replaces all other findings on the BMC."""
    owner = serials.owner_of_bmc(view) if view.host.bmc else ""
    if not owner:
        return list(verdicts)
    reason = f"its BMC reports the serials of {owner}: correct rackproof_bmc_address"
    wrong_address = Verdict(
        host=view.host.name,
        scope=HOST,
        name=READABLE,
        stage=PREFLIGHT,
        verdict=FAIL,
        criterion=CRITERION,
        kind=VerdictKind.IDENTITY,
        value=owner,
        reason=reason,
        detail=reason,
        action=ACTION,
        source=SOURCE,
        basis="policy",
        severity=SEVERITY[ACTION],
    )
    return [*(item for item in verdicts if item.verdict == PASS or not item.name.startswith(BMC)), wrong_address]
