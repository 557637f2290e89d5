"""Processes that end with the test that started them, however that ends."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator


@contextlib.contextmanager
def process_group(command: list[str], **options) -> Iterator[subprocess.Popen]:
    """Runs ``command`` in a group of its own. All of the group is killed at the end of the block, and where this process
    is killed too."""
    leader = subprocess.Popen(command, start_new_session=True, **options)
    # It reads from here until nobody is there to write any more.
    guard = subprocess.Popen(
        ["sh", "-c", f"cat; kill -s KILL -- -{leader.pid}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield leader
    finally:
        guard.communicate()
        leader.wait()
