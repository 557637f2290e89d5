"""SIGTERM, as schedulers send it, closes the sessions before it ends the process, so that their places on the servers
are free at once. Where SIGTERM has a handler of the program's own, that decides."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .connection import Connection

_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def close_first(connection: Connection) -> None:
    """Has SIGTERM close ``connection`` first. Only from the main thread on, as Python wants it."""
    _connections.add(connection)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _close_and_end)


def _close_and_end(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_DFL)
    for connection in list(_connections):
        connection.close()
    os.kill(os.getpid(), number)


def _forget_in_child() -> None:
    """A forked child has no sessions, and ends as it would have."""
    if signal.getsignal(signal.SIGTERM) is _close_and_end:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget_in_child)
