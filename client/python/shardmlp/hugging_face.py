"""Hugging Face's Trainer, and those that derive from it such as trl's, over an offloaded model.

    remote = shardmlp.offload(model, "localhost:50051")
    trainer = Trainer(model, arguments, train_dataset=data)
    attach(trainer, remote)
    trainer.train()
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from .errors import Error, StepAborted
from .remote import Remote

# In a checkpoint's folder, beside what the Trainer writes: the server's checkpoint of the same step.
_FILE = "shardmlp.json"
_TRIES = 3


def attach(trainer: Trainer, remote: Remote) -> None:
    """Makes ``trainer`` train the server's part of its model too. Call it once, before ``trainer.train()``.

    - The trainer's optimizer is wrapped, whether it makes its own or was given one.
    - Each checkpoint of the trainer has one on the server, which must have a checkpoint folder: named after the output
      folder and the server's step, and noted in the trainer's. ``resume_from_checkpoint`` and
      ``load_best_model_at_end`` restore both, or raise. Offload with ``resume=True`` in a script that resumes.
      ``save_total_limit`` deletes both.
    - A step that the server aborts is run again from its first micro-batch, up to 3 times. One of several trainers
      can't do so by itself, nor one with a GradScaler (fp16) or in DeepSpeed's engine: StepAborted ends their run.
    - What ends ``train()`` in mid-step, as Ctrl-C does, discards the step, here and on the server. ``train()``, with
      ``resume_from_checkpoint=True``, goes on from the last checkpoint: in the same process or in another, and also
      where the server was started again in between.

    Gradient accumulation, schedules, clipping (the logged grad_norm is the whole model's), autocast, evaluation and
    saving are the trainer's own.

    Raises:
        TypeError: ``trainer`` is no transformers.Trainer.
        ValueError: Its model is not the one that was offloaded.
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(f"got a {type(trainer).__qualname__}, expected a transformers.Trainer")
    if not any(module is remote.layers[0].module for module in trainer.model.modules()):
        raise ValueError("the trainer's model is not the one that was offloaded: give it that, and attach the trainer")
    update = _Update(trainer, remote)
    trainer.train = update.train
    trainer.training_step = update.training_step
    trainer.accelerator.clip_grad_norm_ = update.clip
    trainer._load_from_checkpoint = _restoring_first(trainer._load_from_checkpoint, remote)
    load_best = trainer._load_best_model

    def load_best_model() -> None:
        _restore(trainer.state.best_model_checkpoint, remote)
        load_best()

    trainer._load_best_model = load_best_model
    trainer.add_callback(_Callback(remote, update))


class _Update:
    """One update of the trainer: its micro-batches and clipping as they went, to be done again where it is aborted."""

    def __init__(self, trainer: Trainer, remote: Remote) -> None:
        self._remote = remote
        # Neither a GradScaler's step() nor DeepSpeed's, which it takes with the last backward, can be begun anew from
        # within; of several trainers, none by itself.
        bound = trainer.accelerator.scaler is not None or trainer.is_deepspeed_enabled
        self._redoes = remote.trainer_count == 1 and not bound
        self._run_train = trainer.train
        self._run_training_step = trainer.training_step
        self._run_clip = trainer.accelerator.clip_grad_norm_
        self.begin()

    def begin(self) -> None:
        self._batches: list[tuple[Any, dict, tuple, dict]] = []
        self._clips: list[tuple[list[torch.nn.Parameter], tuple, dict]] = []

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer.train. What leaves it in mid-step, as Ctrl-C does, discards the step."""
        try:
            return self._run_train(*args, **kwargs)
        except BaseException:
            self._remote.redo = None
            self.begin()
            self._remote._step.abandon()
            raise

    def training_step(self, model: torch.nn.Module, inputs: dict, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As Trainer.training_step. The loss is the last run's."""
        self._batches.append((model, inputs, args, kwargs))
        try:
            return self._run_training_step(model, dict(inputs), *args, **kwargs)
        except StepAborted as error:
            return self._again(error)

    def clip(self, parameters, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """As Accelerator.clip_grad_norm_."""
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        self._clips.append((parameters, args, kwargs))
        try:
            return self._run_clip(parameters, *args, **kwargs)
        except StepAborted as error:
            self._again(error)
            return self._run_clip(parameters, *args, **kwargs)

    def redo(self, error: StepAborted) -> None:
        """All that is to be committed."""
        self._again(error)
        for parameters, args, kwargs in self._clips:
            self._run_clip(parameters, *args, **kwargs)

    def _again(self, error: StepAborted) -> torch.Tensor:
        if not self._redoes:
            raise error
        for _ in range(_TRIES):
            try:
                for model, inputs, args, kwargs in self._batches:
                    loss = self._run_training_step(model, dict(inputs), *args, **kwargs)
                return loss
            except StepAborted as again:
                error = again
        raise error


class _Callback(TrainerCallback):
    def __init__(self, remote: Remote, update: _Update) -> None:
        self._remote = remote
        self._update = update
        self._saved: set[str] = set()  # the server's checkpoints of this output folder

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        own = getattr(optimizer, "optimizer", optimizer)  # accelerate's is around it
        if own is not self._remote.optimizer:
            self._remote.wrap(own)
        self._remote.redo = self._update.redo
        self._saved = _noted(args.output_dir)

    def on_train_end(self, args, state, control, **kwargs):
        self._remote.redo = None
        self._update.begin()
        if state.is_world_process_zero:
            self._delete_rotated(args.output_dir)

    def on_step_begin(self, args, state, control, **kwargs):
        self._update.begin()

    def on_save(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if folder.is_dir():  # else the trainer has deleted it already, as beyond its save_total_limit
            name = None
            if self._remote._servers.training:
                name = self._remote.save_checkpoint(f"{_plain_name(args.output_dir)}-{self._remote.step}").name
            (folder / _FILE).write_text(json.dumps({"checkpoint": name, "step": self._remote.step}))
        self._delete_rotated(args.output_dir)

    def _delete_rotated(self, output_dir: str) -> None:
        """Of folders that the trainer has deleted, the server's part."""
        noted = _noted(output_dir)
        for name in self._saved - noted:
            try:
                self._remote.delete_checkpoint(name)
            except Error as error:
                if error.reason != "UNKNOWN_CHECKPOINT":
                    warnings.warn(f"the server's checkpoint {name} stays, though the trainer's was deleted: {error}")
        self._saved = noted


def _noted(output_dir: str) -> set[str]:
    """The server's checkpoints of the trainer's in ``output_dir``."""
    notes = (json.loads(file.read_text()) for file in Path(output_dir).glob(f"checkpoint-*/{_FILE}"))
    return {note["checkpoint"] for note in notes} - {None}


def _plain_name(path: str) -> str:
    """The last part of ``path``, as a checkpoint may be called."""
    name = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in Path(path).resolve().name)
    return name.lstrip(".")[:100] or "trainer"


def _restoring_first(load, remote: Remote):
    def load_from_checkpoint(folder: str, *args: Any, **kwargs: Any) -> None:
        _restore(folder, remote)
        load(folder, *args, **kwargs)

    return load_from_checkpoint


def _restore(folder: str, remote: Remote) -> None:
    """The server's checkpoint that belongs to the trainer's in ``folder``. That its weights are those of the folder is
    checked when the folder is loaded."""
    file = Path(folder) / _FILE
    if not file.exists():
        raise ValueError(
            f"{folder} has no {_FILE}, which names the server's checkpoint of the same step: it was saved without "
            "shardmlp, or the run ended before the server had saved its part. Resume from an earlier one"
        )
    saved = json.loads(file.read_text())
    if saved["checkpoint"] is None:  # nothing was trained on the server
        return
    remote.restore(saved["checkpoint"])
    if remote.step != saved["step"]:
        raise ValueError(
            f"{folder} was saved at the server's step {saved['step']}, and its checkpoint {saved['checkpoint']} is of "
            f"step {remote.step}: another run has saved under that name"
        )
