"""Waiting for another process to get somewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T], seconds: float = 30) -> T:
    """Asks ``condition`` again and again until it gives something true, which is returned."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not so within {seconds} seconds"
        time.sleep(0.02)
    return result
