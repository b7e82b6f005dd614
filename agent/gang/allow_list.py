"""Restrict a listening socket to a list of client addresses, with a packet filter on the socket.

The kernel drops packets to the socket from any other address. The filter needs no privilege, no firewall rule and no cleanup, and
affects no other port. It must be attached before the socket listens: then every accepted connection inherits it.
"""

from __future__ import annotations

import ctypes
import ipaddress
import socket
import struct
from collections.abc import Iterable

SO_ATTACH_FILTER = 26
NETWORK_HEADER = 0xFFF00000
"""Base offset of the IP header in a filter program: SKF_NET_OFF of linux/filter.h, -0x100000 as an unsigned number."""
LOAD, EQUALS, RETURN = 0x20, 0x15, 0x06
"""BPF_LD|BPF_W|BPF_ABS, BPF_JMP|BPF_JEQ|BPF_K and BPF_RET|BPF_K of linux/bpf_common.h."""
ACCEPT_PACKET, DROP_PACKET = 0xFFFFFFFF, 0
SOURCE_OFFSET = {socket.AF_INET: 12, socket.AF_INET6: 8}
"""Offset of the source address in the IP header."""

Instruction = tuple[int, int, int, int]
"""Operation code, number of instructions to skip if true, number to skip if false, operand."""


def admit_only(channel: socket.socket, senders: Iterable[str]) -> None:
    """Drop all packets to this socket except those from `senders` (numeric addresses).

    Raises:
        OSError: the kernel refuses the filter. With many addresses the filter may need more memory than net.core.optmem_max.
    """
    program = _filter_program(channel.family, senders)
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *instruction) for instruction in program))
    channel.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("@HP", len(program), ctypes.addressof(code)))


def _filter_program(family: int, senders: Iterable[str]) -> list[Instruction]:
    """Return a filter program that accepts a packet if its source address is one of `senders`. It compares 32 bits at a time.

    Senders whose IP version differs from that of the socket are left out.
    """
    version, source_offset = (
        {socket.AF_INET: 4, socket.AF_INET6: 6}[socket.AddressFamily(family)],
        SOURCE_OFFSET[socket.AddressFamily(family)],
    )
    addresses = {ipaddress.ip_address(sender.partition("%")[0]) for sender in senders}
    program: list[Instruction] = []
    for address in sorted((address for address in addresses if address.version == version), key=int):
        words = struct.unpack(f"!{len(address.packed) // 4}I", address.packed)
        for index, word in enumerate(words):
            rest_of_address = 2 * (len(words) - index) - 1
            program.append((LOAD, 0, 0, NETWORK_HEADER + source_offset + 4 * index))
            program.append((EQUALS, 0, rest_of_address, word))
        program.append((RETURN, 0, 0, ACCEPT_PACKET))
    return [*program, (RETURN, 0, 0, DROP_PACKET)]
