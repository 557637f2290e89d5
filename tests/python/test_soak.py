"""The soak's short form, and that its rule sees what it is there for; scripts/soak has the long form."""

from __future__ import annotations

import contextlib
import math

import pytest
from links import connect
from soak import FLAGS, KINDS, Sample, Watched, draw, judge, play, table


def test_a_server_stays_as_it_is_under_clients_that_come_go_stall_and_die(folder, serve, tmp_path):
    server = serve(folder("llama"), *FLAGS)
    outcome = play(server, seconds=10, clients=4, pause=0.05, seed=3, log=print)
    print(table(outcome))
    assert outcome.well, table(outcome)
    assert {what.split()[0] for what in outcome.visits} == set(KINDS)
    draw(outcome, tmp_path / "soak.png")
    assert (tmp_path / "soak.png").read_bytes()[:4] == b"\x89PNG"


def samples(level) -> list[Sample]:
    """Of ten minutes, in which each has the value of ``level(seconds)``."""
    return [Sample(second, *[level(second)] * 4) for second in range(600)]


FLAT = Sample(0, 50, 50, 50, 0)


@pytest.mark.parametrize(
    "level, plateau",
    [
        (lambda s: 50, True),
        (lambda s: 50 + 20 * math.sin(s), True),  # comes and goes
        (lambda s: 90 - 40 * math.exp(-s / 60), True),  # rises to a level
        (lambda s: 50 + s / 30, False),  # rises on
        (lambda s: 50 + (s // 60) * 3, False),  # so too, by steps
    ],
)
@pytest.mark.parametrize("name", ["resident_mib", "descriptors", "threads", "sessions"])
def test_a_rise_that_goes_on_is_seen(name, level, plateau):
    assert judge(name, FLAT, samples(level), FLAT).plateau == plateau


def test_what_does_not_come_back_is_seen(folder, serve):
    server = serve(folder("llama"), *FLAGS)
    server.await_serving()
    watched = Watched(server)
    before = watched.at_rest()
    with contextlib.ExitStack() as held:
        for _ in range(8):
            held.enter_context(contextlib.closing(connect(server.target)))
        kept = watched.at_rest()
    gone = watched.at_rest()
    run = [watched.sample(), watched.sample(), watched.sample(), watched.sample()]
    assert not judge("descriptors", before, run, kept).back
    assert judge("descriptors", before, run, gone).back
    assert judge("sessions", before, run, gone).back
    assert not judge("sessions", before, run, Sample(0, 0, 0, 0, 1)).back
