"""A connection's way to a server, which can be cut, mended and slowed while it is in use."""

from __future__ import annotations

import contextlib
import socket
import threading
import time


LATE = 0.05  # seconds each way, on a slow link


class Link:
    """Passes on to ``server``, an address, what is sent to ``address``. Cut, it keeps its connections open and passes
    nothing, as a cable that was pulled; what was sent arrives once it is mended. Slow, it is late with each piece."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "127.0.0.1:%d" % self._listener.getsockname()[1]
        self._whole = threading.Event()
        self._whole.set()
        self._late = 0.0
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._whole.clear()

    def slow(self) -> None:
        self._late = LATE

    def mend(self) -> None:
        self._late = 0.0
        self._whole.set()

    def close(self) -> None:
        self._listener.close()
        self.mend()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._open, args=(client,), daemon=True).start()

    def _open(self, client: socket.socket) -> None:
        self._whole.wait()
        try:
            server = connect(self._server)
        except OSError:
            return client.close()
        threading.Thread(target=self._pass, args=(client, server), daemon=True).start()
        self._pass(server, client)

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                time.sleep(self._late)
                self._whole.wait()
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def connect(address: str) -> socket.socket:
    """To "host:port" or "unix:/path"."""
    if not address.startswith("unix:"):
        host, _, port = address.rpartition(":")
        return socket.create_connection((host, int(port)))
    end = socket.socket(socket.AF_UNIX)
    try:
        end.connect(address.removeprefix("unix:"))
    except OSError:
        end.close()
        raise
    return end
