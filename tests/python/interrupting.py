"""Ctrl-C at the moment that the main thread waits in a call to the server."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import shardmlp

HOLD_SECONDS = 0.3
PACKAGE = str(Path(shardmlp.__file__).parent)


def await_standing(over: threading.Event) -> bool:
    """Waits until the main thread has stood at one place of the package's own code for a while, which it does in a
    native call alone. False where it is `over` before."""
    main = threading.main_thread().ident

    def place():
        frame = sys._current_frames()[main]
        return (frame.f_code, frame.f_lasti) if frame.f_code.co_filename.startswith(PACKAGE) else None

    before = None
    while not over.wait(HOLD_SECONDS):
        now = place()
        if now is not None and now == before:
            return True
        before = now
    return False


@contextlib.contextmanager
def interrupted(then: Callable[[], None] = lambda: None):
    """The process gets SIGINT once the main thread stands in a call, and `then` is called. KeyboardInterrupt must come
    of it."""
    over = threading.Event()

    def interrupt():
        if await_standing(over):
            os.kill(os.getpid(), signal.SIGINT)
            then()

    thread = threading.Thread(target=interrupt)
    # Python leaves SIGINT ignored where it was when it started, as in a shell's background job.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGINT, handler)


def stop_here() -> None:
    """In a script that end_by_signal() runs: lets it freeze the server, and says once the main thread stands in a
    call."""
    print("here", flush=True)
    sys.stdin.readline()
    threading.Thread(
        target=lambda: await_standing(threading.Event()) and print("stands", flush=True), daemon=True
    ).start()


def end_by_signal(script: str, arguments: list, server, number: int) -> None:
    """Runs ``script``, which calls stop_here(), and signals it while it stands in a call to the frozen server, as a
    terminal or a scheduler does. It must end by the signal."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(command, cwd=Path(__file__).parent, **pipes)
    said = ["here\n" in iter(process.stdout.readline, "")]  # among what a Trainer logs
    server.freeze()
    process.stdin.write("go on\n")
    process.stdin.flush()
    said.append("stands\n" in iter(process.stdout.readline, ""))
    process.send_signal(number)
    server.thaw()
    _, errors = process.communicate(timeout=60)
    assert all(said), errors
    # What Python makes of Ctrl-C's exception in the end depends on what was imported.
    assert process.returncode == -number or (number == signal.SIGINT and errors.endswith("KeyboardInterrupt\n")), errors
