"""What replicas reach each other over, each of which can be cut off and slowed."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import select
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections import deque

from links import LATE, Link


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


class Loopback:
    """All on this host. Cut off or slowed is a replica's stream to the coordinator; sums go around it."""

    def __init__(self, count: int) -> None:
        self.count = count
        coordinator = f"127.0.0.1:{free_port()}"
        self._links = [Link(coordinator) for _ in range(1, count)]
        self._coordinators = [coordinator, *(link.address for link in self._links)]

    def prefix(self, rank: int) -> tuple[str, ...]:
        """Of a command that runs where replica ``rank`` does."""
        return ()

    def flags(self, rank: int) -> tuple[str, ...]:
        return (f"--coordinator={self._coordinators[rank]}",)

    def cut(self, rank: int) -> None:
        for link in self._of(rank):
            link.cut()

    def slow(self, rank: int) -> None:
        for link in self._of(rank):
            link.slow()

    def mend(self, rank: int) -> None:
        for link in self._of(rank):
            link.mend()

    def close(self) -> None:
        for link in self._links:
            link.close()

    def _of(self, rank: int) -> list[Link]:
        return self._links if rank == 0 else [self._links[rank - 1]]


class Namespaces:
    """Each replica on a host of its own, as the kernel sees it: a network namespace, with one interface. Cut off or
    slowed is all that goes over it. The network between them is this process, which passes the packets on."""

    PORT = 50050
    _serials = itertools.count()

    @staticmethod
    def refusal() -> str:
        """Why there can be none here; empty where there can."""
        if shutil.which("ip") is None:
            return "needs network namespaces, and there is no ip (iproute2)"
        name = f"shardmlp-{os.getpid()}-try"
        tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
        if tried.returncode != 0:
            return f"needs the right to add network namespaces: {tried.stderr.strip()}"
        subprocess.run(["ip", "netns", "del", name], check=True)
        try:
            os.close(os.open("/dev/net/tun", os.O_RDWR))
        except OSError as error:
            return f"needs /dev/net/tun: {error}"
        return ""

    def __init__(self, count: int) -> None:
        self.count = count
        serial = next(self._serials)
        self._names = [f"shardmlp-{os.getpid()}-{serial}-{rank}" for rank in range(count)]
        self._interfaces: list[int] = []
        self._late = [0.0] * count
        self._on_the_way: list[deque[tuple[float, bytes]]] = [deque() for _ in range(count)]  # when due, by destination
        self._closed, self._closing = os.pipe()
        try:
            for rank in range(count):
                self._add_host(rank)
        except BaseException:
            self._remove()
            raise
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def prefix(self, rank: int) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self._names[rank])

    def flags(self, rank: int) -> tuple[str, ...]:
        return (f"--coordinator={self.host(0)}:{self.PORT}", "--insecure-listen-anywhere")

    def host(self, rank: int) -> str:
        return f"10.77.0.{rank + 1}"

    def cut(self, rank: int) -> None:
        self._ip(rank, "link", "set", "eth0", "down")

    def slow(self, rank: int) -> None:
        self._late[rank] = LATE

    def mend(self, rank: int) -> None:
        self._late[rank] = 0.0
        self._ip(rank, "link", "set", "eth0", "up")

    def close(self) -> None:
        os.write(self._closing, b"x")
        self._thread.join()
        self._remove()

    def _remove(self) -> None:
        for interface in (*self._interfaces, self._closed, self._closing):
            os.close(interface)
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def _add_host(self, rank: int) -> None:
        subprocess.run(["ip", "netns", "add", self._names[rank]], check=True)
        outside = f"sm{os.getpid()}-{rank}"  # its name until it is moved
        interface = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        self._interfaces.append(interface)
        tunsetiff, iff_tun, iff_no_pi = 0x400454CA, 0x0001, 0x1000
        fcntl.ioctl(interface, tunsetiff, struct.pack("16sH22x", outside.encode(), iff_tun | iff_no_pi))
        subprocess.run(["ip", "link", "set", outside, "netns", self._names[rank]], check=True)
        self._ip(rank, "link", "set", outside, "name", "eth0")
        self._ip(rank, "addr", "add", f"{self.host(rank)}/24", "dev", "eth0")
        self._ip(rank, "link", "set", "lo", "up")
        self._ip(rank, "link", "set", "eth0", "up")

    def _ip(self, rank: int, *arguments: str) -> None:
        subprocess.run(["ip", "-n", self._names[rank], *arguments], check=True)

    def _carry(self) -> None:
        """Takes each packet to the interface of its address, late where either end is slow."""
        while True:
            due = min((queue[0][0] for queue in self._on_the_way if queue), default=None)
            wait = None if due is None else max(due - time.monotonic(), 0.0)
            ready, _, _ = select.select([*self._interfaces, self._closed], [], [], wait)
            if self._closed in ready:
                return
            for interface in ready:
                self._take(self._interfaces.index(interface))
            self._deliver()

    def _take(self, source: int) -> None:
        with contextlib.suppress(OSError):  # an interface that is down
            packet = os.read(self._interfaces[source], 1 << 16)
            to_rank = packet[19] - 1
            if packet[0] >> 4 == 4 and packet[16:19] == bytes([10, 77, 0]) and 0 <= to_rank < len(self._interfaces):
                late = self._late[source] + self._late[to_rank]
                self._on_the_way[to_rank].append((time.monotonic() + late, packet))

    def _deliver(self) -> None:
        for rank, queue in enumerate(self._on_the_way):
            while queue and queue[0][0] <= time.monotonic():
                _, packet = queue.popleft()
                with contextlib.suppress(OSError):
                    os.write(self._interfaces[rank], packet)
