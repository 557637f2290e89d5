"""A TCP proxy that knows gRPC's framing just enough to cut or hold a connection at a chosen message."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import defaultdict

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA = 0
PADDED = 0x8


class Messages:
    """Finds where gRPC messages end in one direction of an HTTP/2 connection."""

    def __init__(self, preface: bytes) -> None:
        self._unread = bytearray()
        self._preface = len(preface)
        self._streams: dict[int, bytearray] = defaultdict(bytearray)

    def ends(self, data: bytes) -> list[int]:
        """Offsets in ``data`` behind the frames that each end a message."""
        before = len(self._unread)
        self._unread += data
        used = 0
        ends = []
        if self._preface:
            if len(self._unread) < self._preface:
                return []
            used, self._preface = self._preface, 0
        while len(self._unread) - used >= 9:
            frame = bytes(self._unread[used : used + 9])
            length = int.from_bytes(frame[:3], "big")
            if len(self._unread) - used - 9 < length:
                break
            if frame[3] == DATA:
                assert not frame[4] & PADDED, "gRPC does not pad"
                stream = self._streams[int.from_bytes(frame[5:9], "big")]
                stream += self._unread[used + 9 : used + 9 + length]
                if self._take_messages(stream):
                    ends.append(used + 9 + length - before)
            used += 9 + length
        del self._unread[:used]
        return ends

    @staticmethod
    def _take_messages(stream: bytearray) -> int:
        count = 0
        while len(stream) >= 5 and len(stream) >= 5 + int.from_bytes(stream[1:5], "big"):
            del stream[: 5 + int.from_bytes(stream[1:5], "big")]
            count += 1
        return count


class CuttingProxy:
    """Passes everything on, until a chosen number of messages (of both directions) have passed; then, once, right
    behind that message, it cuts every connection, or holds what follows in that direction. It passes everything on
    again afterwards."""

    def __init__(self, connect) -> None:
        """``connect()`` gives a socket that is connected to the server."""
        self._connect = connect
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.target = "127.0.0.1:%d" % self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._left: int | None = None
        self._hold: threading.Event | None = None  # set where what follows may go on
        self._answers = False  # are held too
        self._holds = False  # both directions, now
        self.passed = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_at(self, message: int | None) -> None:
        """Counts from here: 1 cuts behind the next message; None never cuts."""
        with self._lock:
            self._left, self._hold, self._holds, self.passed = message, None, False, 0

    def hold_at(self, message: int, answers: bool = False) -> None:
        """As cut_at, but keeps what follows in the message's direction, or with ``answers`` in both, until release() or
        drop()."""
        with self._lock:
            self._left, self._hold, self._holds, self.passed = message, threading.Event(), False, 0
            self._answers = answers

    def release(self) -> None:
        self._holds = False
        if self._hold is not None:
            self._hold.set()

    def drop(self) -> None:
        """Cuts every connection, and what is kept of it is lost."""
        with self._lock:
            self._cut()
        self.release()

    @property
    def has_cut(self) -> bool:
        return self._left is None

    def close(self) -> None:
        self._listener.close()
        self.release()
        with self._lock:
            self._cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = self._connect()
                except OSError:  # nobody is there now
                    client.close()
                    continue
                with self._lock:
                    self._open += [client, server]
                for source, sink, preface in ((client, server, PREFACE), (server, client, b"")):
                    threading.Thread(target=self._pass, args=(source, sink, Messages(preface)), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, messages: Messages) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                hold = None
                with self._lock:
                    ends = messages.ends(data)
                    self.passed += len(ends)
                    if self._left is not None and len(ends) >= self._left > 0:
                        sink.sendall(data[: ends[self._left - 1]])
                        data = data[ends[self._left - 1] :]
                        self._left, hold = None, self._hold
                        if hold is None:
                            self._cut()
                            return
                        self._holds = self._answers
                    if self._left is not None:
                        self._left -= len(ends)
                    hold = self._hold if self._holds else hold
                if hold is not None:
                    hold.wait()
                sink.sendall(data)
        if self._holds:
            self._hold.wait()  # nor does the other end hear that this one is gone
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _cut(self) -> None:
        for end in self._open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._open.clear()
