"""The scope of an observation: the part of a host, or the gang, that was observed.

In JSON a scope is a string: `host`; `gpu=0` and `gpu=0,link=3` (NVML index; `Record.gpus` maps it to serial and UUID);
`pci=0000:1b:00.0` (a device, as the bus reports it); `cpu=0` (a process of a rehearsal); `gang=rack12` (a gang: the hosts of one
multi-node launch). Only this module splits such strings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

HOST = "host"
CACHE_SIZE = 1 << 17
"""Maximum number of cached scopes: 16 times as many as one host has. Hosts of the same type have the same scopes."""
MAX_INDEX_DIGITS = 5
"""Maximum number of digits of a device's index. A longer number is a name, not an index."""


@dataclass(frozen=True, kw_only=True)
class Scope:
    """A parsed scope."""

    text: str
    kind: str
    """Kind of the last, narrowest label: `link` for `gpu=0,link=3`; `host` for the whole host."""
    labels: Mapping[str, str]
    """`{"gpu": "0", "link": "3"}`; empty for `host`."""
    device: str
    """The first, widest label: `gpu=0` for `gpu=0,link=3`; `host` for the whole host."""
    below: str
    """The labels after the device: `link=3` for `gpu=0,link=3`; empty for a whole device."""
    part: str
    """The part that can be replaced: the device, or a DIMM (`mc=0,dimm=1`)."""
    device_kind: str
    """Kind of the first label: `gpu` for `gpu=0,link=3`."""
    index: int | None
    """Index of the device: 0 for `gpu=0,link=3`; None if it is not a number."""

    @staticmethod
    def parse(text: str) -> Scope:
        """Return the scope in `text`. The result is cached."""
        return _parsed(text)

    @property
    def below_part(self) -> str:
        """The labels after the part: `link=3` for `gpu=0,link=3`."""
        return self.text[len(self.part) + 1 :]

    @property
    def has_repeated_kind(self) -> bool:
        """Whether two labels have the same kind, which is invalid."""
        return self.text.count(",") + 1 > max(1, len(self.labels))

    @property
    def is_gang(self) -> bool:
        """Whether the hosts of a gang made the observation together."""
        return self.device_kind == "gang"

    @property
    def is_in_fabric(self) -> bool:
        """Whether the part is a rail or a switch, which several hosts share."""
        return self.device_kind in ("rail", "switch")

    @property
    def is_one_device(self) -> bool:
        """Whether the scope is a whole GPU, or a whole process of a rehearsal, with an index."""
        return self.device_kind in ("gpu", "cpu") and self.index is not None and not self.below

    def get(self, kind: str) -> str:
        """Return the value of the label of that kind, or an empty string."""
        return self.labels.get(kind, "")

    def contains(self, other: str) -> bool:
        """Return whether `other` is this scope, or begins with its labels. `host` contains only itself."""
        return other == self.text or other.startswith(f"{self.text},")

    def without(self, kind: str) -> str:
        """Return the scope without its last label if that has this kind: `gpu=0` for `gpu=0,link=3` and `link`."""
        return self.text.rpartition(",")[0] if self.kind == kind and "," in self.text else self.text

    def on(self, device: str) -> str:
        """Return the same scope on another device: `gpu=1,link=3` for `gpu=0,link=3` and `gpu=1`."""
        return f"{device},{self.below}" if self.below else device


@lru_cache(maxsize=CACHE_SIZE)
def _parsed(text: str) -> Scope:
    device, _, below = text.partition(",")
    device_kind, _, name = device.partition("=")
    labels = dict(label.split("=", 1) for label in text.split(",") if "=" in label)
    is_index = name.isascii() and name.isdigit() and len(name) <= MAX_INDEX_DIGITS
    return Scope(
        text=text,
        kind=text.rsplit(",", 1)[-1].split("=")[0],
        labels=labels,
        device=device,
        below=below,
        part=text if device_kind == "mc" and below.startswith("dimm=") else device,
        device_kind=device_kind,
        index=int(name) if is_index else None,
    )


def directory_scope(path: str) -> str:
    """Return the scope of an absolute path: `directory=data:scratch` for `/data/scratch`. A scope cannot contain a slash."""
    return f"directory={path.strip('/').replace('/', ':') or ':'}"


def directory_path(name: str) -> str:
    """Return the path for the value of the label `directory`: `/data/scratch` for `data:scratch`."""
    return f"/{name.replace(':', '/').strip('/')}"


def pci_address(bus_id: str) -> str:
    """Return a PCI address as sysfs writes it, `0000:1b:00.0`. NVML writes `00000000:1B:00.0`.

    A domain has four digits, or more if its number needs them (`10000:01:00.0` behind an Intel VMD).
    """
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain.lstrip('0').rjust(4, '0') if len(domain) > 4 else domain}:{rest}"
