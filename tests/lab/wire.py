"""Simulate a bad link on kernels without netem: forward frames between two network interfaces, with a delay or with losses.

    python wire.py INTERFACE INTERFACE DELAY_SECONDS LOST_SHARE

LOST_SHARE is the share of full frames (1500 B) that are lost. One frame is lost each time that 1500 B / LOST_SHARE have passed.
With 0.01, this is one frame in every 150 kB, so every exchange of more than 150 kB has losses. TCP may repair one loss within
milliseconds. After several losses in one exchange, it waits for its retransmission timeout.

The program needs CAP_NET_RAW. With PACKET_VNET_HDR each frame has a header that names the offloads still to be done (checksum,
segmentation), so the offloads of the interfaces can stay enabled.
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


def open_socket(interface: str) -> socket.socket:
    """Return a socket that receives and sends complete Ethernet frames on an interface."""
    raw_socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    raw_socket.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    raw_socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    raw_socket.bind((interface, ALL_FRAMES))
    raw_socket.setblocking(False)
    return raw_socket


def main(first: str, second: str, delay_s: float, lost_share: float) -> None:
    """Forward frames between two interfaces until the process is killed."""
    a, b = open_socket(first), open_socket(second)
    other = {a: b, b: a}
    order, waiting = itertools.count(), []  # the counter keeps frames with equal times in order
    lost_units = 0.0
    print("ready", flush=True)
    while True:
        timeout_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for ready in select.select([a, b], [], [], timeout_s)[0]:
            try:
                frame, address = ready.recvfrom(FRAME_BYTES)
            except OSError:
                continue
            if address[2] == socket.PACKET_OUTGOING:
                continue
            lost_units += lost_share * len(frame) / MTU
            if lost_units >= 1:
                lost_units %= 1
            else:
                heapq.heappush(waiting, (time.monotonic() + delay_s, next(order), other[ready], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, towards, frame = heapq.heappop(waiting)
            try:
                towards.send(frame)
            except OSError:
                continue  # the queue of the interface is full, so the frame is lost


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
