"""Tokens a second of each contender, measured alternately, and how far its weight gradients are from f64's."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from torch_mlps import DTYPES, LOCAL, MLP, REMOTE, Contender, flags_of, local, make_model, operands, remote, serve
from transformers import LlamaForCausalLM
from weight_gradients import Exact


@dataclass
class Speeds:
    """Of one length, by contender. ``rates``: tokens a second, a round after another."""

    rates: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    sent_bytes_per_token: dict[str, float] = field(default_factory=dict)

    def ratios(self, name: str, reference: str) -> list[float]:
        """Of the same round each, so that a machine which drifts drags both along."""
        return [a / b for a, b in zip(self.rates.get(name, []), self.rates.get(reference, []))]

    def rate(self, name: str) -> float:
        return statistics.median(self.rates[name])


def measure(
    dtype: str, lengths: list[int], rounds: int, too_large: set[tuple[str, int]]
) -> Iterator[tuple[int, Speeds]]:
    """The lengths, ascending. ``too_large``: contenders and lengths that are left out."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        folder, longest = Path(scratch), max(lengths)
        make_model(folder, DTYPES[dtype])
        contenders = {name: local(name, folder, DTYPES[dtype]) for name in LOCAL}
        for name in REMOTE:
            server = stack.enter_context(serve(folder, dtype, *flags_of(name, longest, DTYPES[dtype])))
            contenders[name] = stack.enter_context(remote(server, folder, DTYPES[dtype]))
        exact = Exact(LlamaForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]).get_submodule(MLP))
        x, dy = operands(longest, DTYPES[dtype])
        done = 0
        for tokens in sorted(lengths):
            exact.add(x[:, done:tokens], dy[:, done:tokens])
            done = tokens
            running = {name: c for name, c in contenders.items() if (name, tokens) not in too_large}
            speeds = Speeds({name: [] for name in running})
            for name, contender in running.items():
                first_run(speeds, name, contender, exact, x[:, :tokens], dy[:, :tokens])
            for number in range(rounds):
                one_round(speeds, running, number, x[:, :tokens], dy[:, :tokens])
            yield tokens, speeds


def first_run(speeds: Speeds, name: str, contender: Contender, exact: Exact, x, dy) -> None:
    """Warms up, and gives what needs one run."""
    received = contender.server.received_bytes() if contender.server else 0
    contender.run(x, dy)
    if contender.server:
        speeds.sent_bytes_per_token[name] = (contender.server.received_bytes() - received) / x.shape[1]
    speeds.errors[name] = exact.error_of(contender.gradients())
    contender.clear()


def one_round(speeds: Speeds, contenders: dict[str, Contender], number: int, x, dy) -> None:
    """Every contender once, in an order that turns around from round to round."""
    for name in list(contenders) if number % 2 == 0 else reversed(contenders):
        speeds.rates[name].append(contenders[name].run(x, dy))
        contenders[name].clear()
