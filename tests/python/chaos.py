"""Replicas under random faults: a training run over real processes, and the same run undisturbed.

Both must end with weights that are bit-identical: each replica has one trainer, whose rows it adds in one order, and
the replicas' sums are in one order too, whatever happens.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from models import save_model
from networks import Loopback, Namespaces
from replica_run import LOSS, Replicas, Trainer, equal, final_weights
from waiting import until

KINDS = ("kill", "stop", "cut", "slow")
PHASES = ("forward", "backward", "seal", "commit", "between")
LIMIT = 30.0  # seconds from the end of a fault until a step must have been committed
NETWORKS = {"loopback": Loopback, "namespaces": Namespaces}


@dataclass(frozen=True)
class Fault:
    """Of some replicas, or of the links between them and their trainers: begins ``late`` seconds after a trainer came
    to ``phase``, and is over ``seconds`` later."""

    kind: str
    of: str  # "replica" or "trainer"
    ranks: tuple[int, ...]
    phase: str
    late: float
    seconds: float

    def __str__(self) -> str:
        whose = f"{self.of} {','.join(map(str, self.ranks))}"
        return f"{self.kind} {whose} at {self.phase} + {self.late:.3f} s for {self.seconds:.2f} s"


@dataclass(frozen=True)
class Outcome:
    fault: Fault
    seconds: float  # from its end until all had committed a step
    errors: list[str]  # that trainers got, other than that an attempt was aborted


def draw(dice: random.Random, number: int, count: int) -> list[Fault]:
    """``number`` faults, of each kind as many, for ``count`` replicas, of which one is left at least."""
    kinds = [kind for _ in range(0, number, len(KINDS)) for kind in dice.sample(KINDS, len(KINDS))]
    faults = []
    for kind in kinds[:number]:
        of = "trainer" if kind in ("cut", "slow") and dice.random() < 0.25 else "replica"
        some = 1 if dice.random() < 0.8 else dice.randint(1, max(count - 1, 1))
        ranks = tuple(sorted(dice.sample(range(count), some)))
        # Some are over before anyone is lost.
        faults.append(
            Fault(kind, of, ranks, dice.choice(PHASES), dice.uniform(0, 0.05), dice.uniform(0.05, 2.5 * LOSS))
        )
    return faults


class Run:
    """A training run, with one trainer a replica."""

    def __init__(self, model: Path, network, scratch: Path) -> None:
        self._replicas = Replicas(model, network, scratch)
        self._network = network
        self._trainers = [
            Trainer(model, link.address, rank, network.count) for rank, link in enumerate(self._replicas.links)
        ]
        for trainer in self._trainers:
            trainer.start()

    def endure(self, fault: Fault, dice: random.Random) -> Outcome:
        """Until all have committed a step after the fault was over; AssertionError where they don't in time."""
        before = [len(trainer.errors) for trainer in self._trainers]
        dice.choice(self._trainers).await_phase(fault.phase, 5)
        time.sleep(fault.late)
        self._begin(fault)
        time.sleep(fault.seconds)
        self._end(fault)
        over = time.monotonic()
        goal = max(trainer.done for trainer in self._trainers) + 1
        until(lambda: self._failed() or all(trainer.done >= goal for trainer in self._trainers), LIMIT)
        if self._failed():
            raise next(trainer.failure for trainer in self._trainers if trainer.failure is not None)
        errors = [error for trainer, some in zip(self._trainers, before) for error in trainer.errors[some:]]
        return Outcome(fault, time.monotonic() - over, errors)

    @property
    def steps(self) -> int:
        """That all have done."""
        return min(trainer.done for trainer in self._trainers)

    def finish(self, steps: int) -> dict[str, torch.Tensor]:
        """The weights after ``steps`` steps."""
        for trainer in self._trainers:
            trainer.finish_after(steps)
        for trainer in self._trainers:
            trainer.join()
        return final_weights(self._trainers)

    def close(self) -> None:
        self._replicas.close()

    def _failed(self) -> bool:
        return any(trainer.failure is not None for trainer in self._trainers)

    def _begin(self, fault: Fault) -> None:
        for rank in fault.ranks:
            server, link = self._replicas.servers[rank], self._replicas.links[rank]
            if fault.kind == "kill":
                server.kill()
            elif fault.kind == "stop":
                server.freeze()
            elif fault.kind == "cut":
                link.cut() if fault.of == "trainer" else self._network.cut(rank)
            else:
                link.slow() if fault.of == "trainer" else self._network.slow(rank)

    def _end(self, fault: Fault) -> None:
        for rank in fault.ranks:
            server, link = self._replicas.servers[rank], self._replicas.links[rank]
            if fault.kind == "kill":
                server.start()
            elif fault.kind == "stop":
                server.thaw()
            else:
                link.mend() if fault.of == "trainer" else self._network.mend(rank)


def play(
    network_of, count: int, faults: int, seed: int, model: Path, scratch: Path, log=lambda line: None
) -> tuple[list[Outcome], bool]:
    """What came of each fault, and whether the run ended with the weights of one without any."""
    torch.set_num_threads(1)
    dice = random.Random(seed)
    outcomes = []
    with contextlib.closing(network_of(count)) as network:
        with contextlib.closing(Run(model, network, scratch / "disturbed")) as run:
            for fault in draw(dice, faults, count):
                log(f"step {run.steps}: {fault}")
                outcomes.append(run.endure(fault, dice))
                log("; ".join([f"    went on after {outcomes[-1].seconds:.2f} s", *outcomes[-1].errors]))
            steps = run.steps + 3
            disturbed = run.finish(steps)
    with contextlib.closing(network_of(count)) as network:
        with contextlib.closing(Run(model, network, scratch / "undisturbed")) as run:
            return outcomes, equal(disturbed, run.finish(steps))


def table(outcomes: list[Outcome]) -> str:
    lines = ["fault     count  recovered  named errors  median s   max s"]
    for kind in (*KINDS, "all"):
        some = [outcome for outcome in outcomes if kind in (outcome.fault.kind, "all")]
        times = [outcome.seconds for outcome in some if not outcome.errors]
        if some:
            lines.append(
                f"{kind:8}{len(some):7}{len(times):11}{len(some) - len(times):14}"
                f"{median(times or [0]):10.2f}{max(times, default=0):8.2f}"
            )
    names = Counter(error.split(":")[0] for outcome in outcomes for error in outcome.errors)
    return "\n".join([*lines, *(f"    {name}: {times} times" for name, times in names.most_common())])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=3, help="3 by default")
    parser.add_argument("--faults", type=int, default=200, help="200 by default")
    parser.add_argument("--seed", type=int, default=1, help="which faults, and when")
    parser.add_argument(
        "--network",
        choices=NETWORKS,
        default="loopback",
        help="namespaces: each replica in a network namespace of its own, so that sums are cut and slowed too; as root",
    )
    parser.add_argument("--logs", type=Path, help="a new folder for the servers' logs")
    options = parser.parse_args()
    if options.replicas < 2:
        parser.error(f"--replicas is {options.replicas}, and what one alone has is lost with it: 2 or more")
    if options.network == "namespaces" and (refusal := Namespaces.refusal()):
        parser.error(refusal)
    with tempfile.TemporaryDirectory(prefix="shardmlp-chaos-") as scratch:
        outcomes, same = play(
            NETWORKS[options.network],
            options.replicas,
            options.faults,
            options.seed,
            save_model("llama", Path(scratch) / "model"),
            options.logs or Path(scratch),
            lambda line: print(line, file=sys.stderr, flush=True),
        )
    print(table(outcomes))
    print(f"the weights at the end {'are bit-identical to' if same else 'DIFFER from'} those of the undisturbed run")
    recovered = sum(not outcome.errors for outcome in outcomes)
    return 0 if same and recovered >= 0.95 * len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
