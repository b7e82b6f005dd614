"""A bad wire: forwards the frames between two network interfaces late, or not all of them. For kernels without netem.

    python wire.py INTERFACE INTERFACE DELAY_SECONDS LOST_SHARE

Bits flip, evenly: of what is sent that share of every 1 500 B is lost, with the frame it is in. So long frames are lost sooner
than short ones, and no exchange of many frames is spared by chance.

Needs CAP_NET_RAW. What the kernel would still have to do for a frame (checksum, segments) goes along with it in its header
(PACKET_VNET_HDR), so that no offload needs to be switched off.
"""

from __future__ import annotations

import heapq
import itertools
import select
import socket
import sys
import time

SOL_PACKET, PACKET_VNET_HDR, ALL_FRAMES = 263, 15, 3
FRAME_BYTES, MTU = 1 << 17, 1500
BUFFER_BYTES = 1 << 24


def end(interface: str) -> socket.socket:
    """A socket that hears and sends whole frames on an interface."""
    raw_socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    raw_socket.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    raw_socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    raw_socket.bind((interface, ALL_FRAMES))
    raw_socket.setblocking(False)
    return raw_socket


def main(first: str, second: str, delay_s: float, lost: float) -> None:
    """Forwards until it is killed."""
    a, b = end(first), end(second)
    other = {a: b, b: a}
    order, waiting = itertools.count(), []
    flipped = 0.0
    print("ready", flush=True)
    while True:
        patience = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for ready in select.select([a, b], [], [], patience)[0]:
            try:
                frame, address = ready.recvfrom(FRAME_BYTES)
            except OSError:
                continue
            if address[2] == socket.PACKET_OUTGOING:
                continue
            flipped += lost * len(frame) / MTU
            if flipped >= 1:
                flipped %= 1
            else:
                heapq.heappush(waiting, (time.monotonic() + delay_s, next(order), other[ready], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, towards, frame = heapq.heappop(waiting)
            try:
                towards.send(frame)
            except OSError:
                continue  # the queue of the interface is full: it is lost


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
