"""The way of rows between where a trainer computes and the host memory that they are sent from and received into.

On the host the two are one. Another device's rows are copied on a stream of their own, a chunk at a time, while the call
runs: a shard goes out when its rows are there, and result rows go back to the device as they arrive.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Protocol

import torch

_CHUNK_BYTES = 1 << 20  # no more than a shard has, so that the first one waits for little
_WITH_STREAMS = ("cuda", "xpu")


class Copies(Protocol):
    """Copies between a device and the host, in order. They start once the device is done with what it had been given
    before, and whatever takes part in one may be dropped before it is done."""

    pinned: bool  # whether host memory has to be pinned for them to run beside everything else

    def copy(self, source: torch.Tensor, to: torch.Tensor) -> None:
        """Begins to copy rows."""

    def mark(self) -> Callable[[], object]:
        """What makes the host wait for the copies so far."""

    def join(self) -> None:
        """Makes what the device is given from now on wait for them."""


def copies_with(device: torch.device) -> Copies | None:
    """None for the host, which needs none."""
    if device.type == "cpu":
        return None
    return _StreamCopies(device) if device.type in _WITH_STREAMS else _BlockingCopies()


class Outgoing:
    """Rows of tensors [T, C], one or several of one device, on their way to the server. ``host``: where they are sent
    from. ``await_rows(row_end)``: returns once rows [0, row_end) are there; None where all are."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        copies = copies_with(tensors[0].device)
        tensors = tuple(t.detach() for t in tensors)
        self.await_rows: Callable[[int], None] | None = None
        if copies is None:
            self.host = [_dense(t) for t in tensors]
            return
        self.host = [torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=copies.pinned) for t in tensors]
        self.await_rows = self._await_rows
        self._waits: collections.deque[tuple[int, Callable[[], object]]] = collections.deque()  # by a chunk's first row
        row_count = tensors[0].shape[0]
        step = max(1, _CHUNK_BYTES // max(1, sum(t.shape[1] * t.element_size() for t in tensors)))
        for begin in range(0, row_count, step):
            for source, to in zip(tensors, self.host):
                copies.copy(source[begin : begin + step], to[begin : begin + step])
            self._waits.append((begin, copies.mark()))

    def _await_rows(self, row_end: int) -> None:
        while self._waits and self._waits[0][0] < row_end:
            self._waits[0][1]()
            self._waits.popleft()


class Incoming:
    """Rows [T, C] on their way from the server. ``host``: where they are received. ``arrived(row_end)``: takes rows
    [0, row_end) on from there, of which 0 are the first of a try; None where they need not go on."""

    def __init__(self, row_count: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
        self._copies = copies_with(device)
        pinned = self._copies is not None and self._copies.pinned
        self.host = torch.empty(row_count, columns, dtype=dtype, device="cpu", pin_memory=pinned)
        self.arrived: Callable[[int], None] | None = None
        if self._copies is not None:
            self.arrived = self._arrived
            self._rows = torch.empty(row_count, columns, dtype=dtype, device=device)
            self._taken = 0

    def rows(self) -> torch.Tensor:
        """All of them, on the device."""
        if self._copies is None:
            return self.host
        self._copies.join()
        return self._rows

    def _arrived(self, row_end: int) -> None:
        if row_end > self._taken:
            self._copies.copy(self.host[self._taken : row_end], self._rows[self._taken : row_end])
        self._taken = row_end


class _StreamCopies:
    pinned = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)
        self._stream.wait_stream(torch.accelerator.current_stream(device))

    def copy(self, source: torch.Tensor, to: torch.Tensor) -> None:
        with self._stream:
            to.copy_(source, non_blocking=True)
        for t in (source, to):
            if t.device.type != "cpu":  # pinned memory is kept by torch itself until such a copy is done
                t.record_stream(self._stream)

    def mark(self) -> Callable[[], object]:
        return self._stream.record_event().synchronize

    def join(self) -> None:
        torch.accelerator.current_stream(self._device).wait_stream(self._stream)


class _BlockingCopies:
    pinned = False

    def copy(self, source: torch.Tensor, to: torch.Tensor) -> None:
        to.copy_(source)

    def mark(self) -> Callable[[], object]:
        return lambda: None

    def join(self) -> None:
        pass


def _dense(t: torch.Tensor) -> torch.Tensor:
    """[T, C], each row dense; copied only where it is not so already."""
    dense = t.stride(1) == 1 and (t.shape[0] <= 1 or t.stride(0) >= t.shape[1])
    return t if dense else t.contiguous()
