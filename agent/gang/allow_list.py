"""Who may connect to a listener: a filter on that very socket, which the kernel keeps.

Packets from any other address are dropped before anybody sees them. It needs no privilege, no table of a firewall and no
tidying up: it is there before the socket listens, goes on to every connection made through it, touches no other port, and
is gone with the socket, however its process ends.
"""

from __future__ import annotations

import ctypes
import ipaddress
import socket
import struct
from collections.abc import Iterable

SO_ATTACH_FILTER = 26
NETWORK_HEADER = 0xFFF00000
"""Where the kernel's filter machine shows the IP header: -0x100000 (linux/filter.h, SKF_NET_OFF)."""
LOAD, EQUALS, RETURN = 0x20, 0x15, 0x06
"""BPF_LD|BPF_W|BPF_ABS, BPF_JMP|BPF_JEQ|BPF_K and BPF_RET|BPF_K of linux/bpf_common.h."""
WHOLE_PACKET, NOTHING = 0xFFFFFFFF, 0
SOURCE = {socket.AF_INET: 12, socket.AF_INET6: 8}
"""Of the sender's address in the header."""

Instruction = tuple[int, int, int, int]
"""Code, instructions to jump over where it is so, and where it is not, operand."""


def admit_only(channel: socket.socket, senders: Iterable[str]) -> None:
    """Drops whatever comes to this socket from elsewhere than these numeric addresses.

    Raises:
        OSError: the kernel does not take the filter. One of many addresses may be longer than net.core.optmem_max allows.
    """
    program = instructions(channel.family, senders)
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *one) for one in program))
    channel.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("@HP", len(program), ctypes.addressof(code)))


def instructions(family: int, senders: Iterable[str]) -> list[Instruction]:
    """The filter's program, word by word of each address; addresses of another family cannot come and are left out."""
    version, start = (
        {socket.AF_INET: 4, socket.AF_INET6: 6}[socket.AddressFamily(family)],
        SOURCE[socket.AddressFamily(family)],
    )
    addresses = {ipaddress.ip_address(sender.partition("%")[0]) for sender in senders}
    program: list[Instruction] = []
    for address in sorted((one for one in addresses if one.version == version), key=int):
        words = struct.unpack(f"!{len(address.packed) // 4}I", address.packed)
        for number, word in enumerate(words):
            left = 2 * (len(words) - number) - 1
            program.append((LOAD, 0, 0, NETWORK_HEADER + start + 4 * number))
            program.append((EQUALS, 0, left, word))
        program.append((RETURN, 0, 0, WHOLE_PACKET))
    return [*program, (RETURN, 0, 0, NOTHING)]
