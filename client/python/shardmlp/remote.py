"""shardmlp.offload, and what it returns."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from . import _native
from .connection import Connection, Run, Timeouts
from .credentials import Credentials
from .errors import Error, StepAborted
from .matching import Match, check_local, check_outputs, check_untied, check_weights, local_weights, match_layers
from .optimizers import check_holds, check_optimizer, check_state, refuse_unwrapped
from .remote_mlp import Follower, Placeholder, RemoteMLP, set_fetches
from .servers import MemoryPlan, Servers, choose_replicas
from .step import Step


@dataclass(frozen=True)
class OffloadedLayer:
    """An MLP that was swapped: where it is in the model, what stands there now, and the bytes it freed."""

    path: str
    module: RemoteMLP
    freed_bytes: int


def offload(
    model: nn.Module,
    target: str | Sequence[str],
    *,
    run_id: str = "default",
    trainer_count: int = 1,
    trainer_rank: int = 0,
    resume: bool = False,
    average: bool = True,
    keep_inputs: bool = True,
    connections: int = 1,
    timeouts: Timeouts = Timeouts(),
    credentials: Credentials | None = None,
) -> Remote:
    """Swaps every MLP of ``model`` that the server owns for a :class:`RemoteMLP`, and frees its memory.

    Tensors whose ``requires_grad`` is False get no update; where it is so for all of them, or the server is frozen (all
    are then set to it), this trainer takes part in no step. All checks come before the first swap, so that a refusal
    leaves the model as it was. However the script ends, by Ctrl-C or SIGTERM too, its session is closed, and the step
    that was open is dropped; where the program handles SIGTERM itself, it has to end as usual for that.

    Args:
        model: A transformers model, wrapped or not, or one of the same module paths. It is changed in place.
        target: "host:port" or "unix:/path"; several where each serves some layers (--layers), and a step is one on all;
            or where they are replicas of each other (--replicas), and this trainer has the one of its rank modulo their
            number. Where that is lost and the others go on without it (--on-loss continue), it moves to one of them, and
            the step is aborted.
        run_id: Names the training run; the same on all of its trainers.
        trainer_count: Trainers in the run. A step waits for all of them.
        trainer_rank: This one, from 0.
        resume: Whether to go on from where the server stands: its weights and optimizer state are taken as they are,
            and local parameters and optimizer state are the caller's to load of the same step. Otherwise the server's
            weights must be the model's, and the optimizer that is wrapped starts without state, there as here.
        average: Whether the trainers average their gradients, as DistributedDataParallel does, or add them.
        keep_inputs: Whether the input of each MLP stays here until its backward. False: it is on the server alone
            (--stash-bytes), which takes about H elements a token and layer of memory there rather than here. Saved
            tensor hooks that copy let go of it too early, so that backward raises StepAborted.
        connections: TCP connections to the server.
        timeouts: Seconds to wait for what.
        credentials: TLS and the token, of all servers alike. By default what the environment says
            (:meth:`Credentials.from_environment`), and so nothing where it says nothing.

    Raises:
        ValueError: The model is not the server's (the tensor, module or activation that differs is named), an MLP has
            adapters, hooks or dropout that can't be honoured, it is offloaded already, or two servers have one layer.
        Error: The server is unreachable or refuses the session.
    """
    wrapper = next((m for m in model.modules() if isinstance(m, nn.parallel.DistributedDataParallel)), None)
    if wrapper is not None:
        raise ValueError("the model is wrapped in DistributedDataParallel already: offload it first, and wrap it then")
    check_local(model)
    targets = [target] if isinstance(target, str) else list(target)
    if not targets:
        raise ValueError('target names no server, expected "host:port", "unix:/path", or several of them')
    credentials = Credentials.from_environment() if credentials is None else credentials
    connected = [Connection(each, connections, timeouts, credentials) for each in targets]
    servers = Servers(choose_replicas(connected, trainer_rank))
    matches = {connection: match_layers(model, connection.model) for connection in servers.connections}
    check_untied(match for own in matches.values() for match in own)
    for connection in () if keep_inputs else servers.connections:
        if connection.model.memory.stash_bytes == 0:
            raise ValueError(
                f"{connection.target} has no room for the inputs that keep_inputs=False leaves to it: start it with "
                "--stash-bytes"
            )
    try:
        for connection, own in matches.items():
            train = not connection.model.frozen and any(p.requires_grad for m in own for p in m.parameters())
            connection.open_session(Run(run_id, trainer_count, trainer_rank, train))
            if connection.session.run_under_way and not resume:
                raise Error(
                    f"run {run_id!r} is under way, at step {connection.session.position.step}, and its other trainers "
                    "are there yet: to join it again, offload with resume=True and load this trainer's own parameters "
                    "and optimizer of that step; or stop all, and take them and the server to one checkpoint",
                    "FAILED_PRECONDITION",
                    "RUN_CONFLICT",
                )
        for connection, own in matches.items() if not resume else ():
            check_weights(local_weights(own), connection)
            for match in own:
                check_outputs(match, connection)
        return Remote(model, servers, matches, average, resume, keep_inputs)
    except BaseException:
        servers.close()
        raise


class Remote:
    """The server's part of an offloaded model. Made by :func:`offload`; a context manager that closes the session.

    Attributes:
        model: The model, which now computes its MLPs on the server.
        layers: What was swapped.
        redo: What optimizer.step() does where the server aborted the step, ahead of another try: run the step's batches
            again. None: StepAborted is raised.
    """

    def __init__(
        self,
        model: nn.Module,
        servers: Servers,
        matches: dict[Connection, list[Match]],
        average: bool,
        resume: bool,
        keep_inputs: bool,
    ) -> None:
        self.model = model
        self.redo: Callable[[StepAborted], None] | None = None
        self._servers = servers
        self._step = Step(servers, model, average)
        self._step.fresh_optimizer = not resume and servers.step > 0
        self.layers = [self._swap(match, connection, keep_inputs) for connection, own in matches.items() for match in own]
        placeholders = {name: p for layer in self.layers for name, p in layer.module.placeholders().items()}
        self._step.stand_for({name: placeholders[name] for name in servers.tensors})
        for connection in servers.connections:
            for tensor in connection.model.tensors if connection.model.frozen else ():
                placeholders[tensor.name].requires_grad_(False)
        _discard_first(model, self._step)
        step = weakref.ref(self._step)
        self._unwrapped = refuse_unwrapped(lambda: (own := step()) is not None and own.holds_gradients)
        weakref.finalize(self._step, self._unwrapped.remove)
        self._step.share()
        # DistributedDataParallel has nothing to average of these.
        ignored = [*getattr(model, "_ddp_params_and_buffers_to_ignore", []), *self._names()]
        model._ddp_params_and_buffers_to_ignore = ignored

    @property
    def step(self) -> int:
        """Steps that were committed since the server's weights were first loaded."""
        return self._servers.step

    @property
    def memory_plan(self) -> MemoryPlan:
        """What the server holds, in bytes by use; of several servers, all."""
        return self._servers.memory

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The one that is wrapped."""
        return self._step.optimizer

    @property
    def trainer_count(self) -> int:
        """Trainers in the run."""
        return self._servers.trainer_count

    def placeholders(self) -> set[nn.Parameter]:
        """The model's parameters that stand for the server's tensors, without elements. What shards or replaces
        parameters has to leave them alone: ``fully_shard(..., ignored_params=remote.placeholders())``."""
        return set(self._step.placeholders.values())

    def report(self) -> str:
        """A table of the layers that were swapped: sizes, activation, tensors that are trained, and memory freed."""
        rows = [("layer", "module", "H", "I", "O", "activation", "trained", "freed MiB")]
        for offloaded in self.layers:
            layer = offloaded.module.layer
            trained = [p.requires_grad for p in offloaded.module.placeholders().values()]
            rows.append(
                (
                    str(layer.layer),
                    offloaded.path,
                    str(layer.hidden_size),
                    str(layer.intermediate_size),
                    str(layer.output_size),
                    layer.activation + (", gated" if layer.gated else ""),
                    f"{sum(trained)} of {len(trained)}",
                    f"{offloaded.freed_bytes / 2**20:.1f}",
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows)]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        freed = sum(layer.freed_bytes for layer in self.layers) / 2**20
        targets = ", ".join(connection.target for connection in self._servers.connections)
        return "\n".join([*table, f"{len(self.layers)} MLPs on {targets}, {freed:.1f} MiB freed here"])

    def wrap(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Makes ``optimizer`` train the server's tensors too, and returns it, the same object.

        Its ``step()`` first commits the server's half with each parameter group's hyperparameters as they are then, and
        then does the local half. Where the server can't commit, the local half is not done: StepAborted says to run the
        step's batches again; any other Error leaves gradients as they are, so that ``step()`` may be called again, or
        the run restored. Its ``zero_grad()``, and the model's, first discard what the server holds and no step()
        committed.

        The optimizer must hold the model's parameters, as they are before offload or after it. One of the server's
        tensors that it does not hold, or that has no gradient, gets no update, as in torch.

        Between backward and step(), gradients are clipped, scaled, zeroed and unscaled (GradScaler) by torch's own
        functions: the server's are :class:`ServerGradient` objects in the same ``grad`` attributes.

        Raises:
            ValueError: An optimizer or option that the server lacks, one that holds none of the server's tensors or
                has state of its own for them, or a second optimizer.
        """
        check_optimizer(optimizer)
        if self._step.optimizer is not None:
            raise ValueError("an optimizer is wrapped already, and one alone can commit the server's steps")
        trained = {name: p for name, p in self._step.placeholders.items() if p.requires_grad}
        check_holds(optimizer, trained)
        check_state(optimizer, trained)
        self._step.optimizer = optimizer
        self._unwrapped.remove()
        optimizer.register_step_pre_hook(functools.partial(_commit_first, self))
        optimizer.register_step_post_hook(lambda *_: self._step.show_gradients())
        _discard_first(optimizer, self._step)
        return optimizer

    def state_dict(self) -> dict[str, Any]:
        """A complete checkpoint of the model: ``model.state_dict()``, which fetches the server's weights to the host
        under their own names, in the dtype that the model had. ``model.save_pretrained(path)`` writes the same.
        ``model.load_state_dict()`` takes it, but no weights for the server that it does not have already."""
        return self.model.state_dict()

    def local_state_dict(self) -> dict[str, Any]:
        """``model.state_dict()`` without the server's tensors, to be saved beside a checkpoint of the server."""
        set_fetches(self.model, False)
        try:
            return self.model.state_dict()
        finally:
            set_fetches(self.model, True)

    def save_checkpoint(self, name: str) -> _native.Checkpoint:
        """Saves the server's weights and optimizer state, as of the last commit, under ``name`` on the server. A
        checkpoint of that name is replaced. Local parameters and the optimizer are the caller's to save."""
        return self._servers.save_checkpoint(name)

    def checkpoints(self) -> list[_native.Checkpoint]:
        """The server's checkpoints, oldest first."""
        return self._servers.checkpoints()

    def delete_checkpoint(self, name: str) -> None:
        """Deletes the checkpoint ``name`` on the server. What was restored from it stays.

        Raises:
            Error: NOT_FOUND, no such checkpoint; UNAVAILABLE, another server's process saves in the folder, or restores
                the checkpoint; INVALID_ARGUMENT, something else has the name.
        """
        self._servers.delete_checkpoint(name)

    def restore(self, name: str) -> None:
        """Takes the server back to the checkpoint ``name`` and zeroes local gradients. Works after the server was
        restarted, too. Local parameters and the optimizer are the caller's to take back to the same step. Of several
        trainers, each calls it before any goes on.

        Raises:
            Error: NOT_FOUND, no such checkpoint; DATA_LOSS, it is torn or altered; FAILED_PRECONDITION, it is of
                another model. The server is as it was.
        """
        self._servers.restore_checkpoint(name)
        self._step.fresh_optimizer = False
        self._step.forget()

    def close(self) -> None:
        """Ends the session. The model can't compute its MLPs any more."""
        self._unwrapped.remove()
        self._servers.close()

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _names(self) -> list[str]:
        """Of the placeholders in the model."""
        theirs = {id(p) for p in self._step.placeholders.values()}
        return [name for name, p in self.model.named_parameters(remove_duplicate=False) if id(p) in theirs]

    def _swap(self, match: Match, connection: Connection, keep_input: bool) -> OffloadedLayer:
        freed = sum(p.numel() * p.element_size() for p in match.parameters() if not p.is_meta)
        first, *rest = match.parts
        followers = [Follower(part.module, part.tensors, connection) for part in rest]
        module = RemoteMLP(
            first.module, first.tensors, followers, match.layer, self._step, match.output_dropout, keep_input
        )
        for part, stand_in in zip(match.parts, [module, *followers]):
            parent, _, name = part.path.rpartition(".")
            setattr(self.model.get_submodule(parent), name, stand_in)
        return OffloadedLayer(match.path, module, freed)


def _discard_first(owner: nn.Module | torch.optim.Optimizer, step: Step) -> None:
    """Makes ``owner.zero_grad()`` discard the server's gradients before it zeroes its own."""
    zero_local = owner.zero_grad

    def zero_grad(self, set_to_none: bool = True) -> None:
        step.discard()
        zero_local(set_to_none)
        step.share()

    zero_grad.__doc__ = zero_local.__doc__
    owner.zero_grad = types.MethodType(zero_grad, owner)


def _commit_first(remote: Remote, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """An optimizer's step pre-hook. A closure makes the gradients that are to be committed, so it runs here."""
    closure = kwargs.pop("closure", None) or next(iter(args[1:]), None)
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
        kwargs["closure"] = lambda: loss
    step = remote._step
    try:
        step.commit(optimizer)
    except StepAborted as error:
        if remote.redo is None:
            raise
        remote.redo(error)
        step.commit(optimizer)
    step.hide_gradients()
    return args[:1], kwargs
