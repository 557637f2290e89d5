"""Hugging Face's Trainer and trl's SFTTrainer over an offloaded model, against the same run with the model local."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from models import load_model, relative, tokens
from transformers import PreTrainedTokenizerFast, Trainer, TrainerCallback, TrainingArguments

import shardmlp
from shardmlp.hugging_face import attach

pytestmark = pytest.mark.filterwarnings("ignore")

DATA = [{"input_ids": tokens(seed, batch=1)[0], "labels": tokens(seed, batch=1)[0]} for seed in range(24)]


def arguments(out, **options) -> TrainingArguments:
    """6 updates of 2 micro-batches of 2."""
    options = dict(num_train_epochs=1, save_strategy="no", max_grad_norm=0.5, adam_epsilon=1e-4) | options
    return TrainingArguments(
        output_dir=out,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        weight_decay=0.1,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
        **options,
    )


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def make(model, out, remote=None, callbacks=(), **options) -> Trainer:
    trainer = Trainer(
        model, arguments(out, **options), train_dataset=DATA, eval_dataset=DATA[:4], callbacks=list(callbacks)
    )
    if remote is not None:
        attach(trainer, remote)
    return trainer


def assert_same_run(mine, theirs, bound=1e-5):
    for name in ("loss", "grad_norm", "learning_rate", "eval_loss"):
        assert logged(mine, name) == pytest.approx(logged(theirs, name), rel=bound), name


def assert_same_folders(mine, theirs, bound=1e-3):
    """As plain transformers loads them."""
    expected = load_model(theirs).state_dict()
    got = load_model(mine).state_dict()
    assert got.keys() == expected.keys()
    assert max(relative(got[name], weights) for name, weights in expected.items()) < bound


@pytest.mark.parametrize("max_norm", [0.5, 0.0])
def test_trainer(folder, serve, offload, tmp_path, max_norm):
    """Its own optimizer (a fused AdamW in two groups), accumulation, a schedule, clipping, evaluation, saving."""
    model, local = load_model(folder("llama")), load_model(folder("llama"))
    remote = offload(model, serve(folder("llama")))
    options = dict(max_grad_norm=max_norm, eval_strategy="steps", eval_steps=2)
    mine, theirs = make(model, tmp_path / "a", remote, **options), make(local, tmp_path / "b", **options)
    for trainer in (mine, theirs):
        trainer.train()
        trainer.save_model()
    assert remote.step == 6
    assert len(logged(mine, "grad_norm")) == 6 and len(logged(mine, "eval_loss")) == 3
    assert_same_run(mine, theirs)
    assert_same_folders(tmp_path / "a", tmp_path / "b")


def test_trainer_with_an_optimizer_of_the_users(folder, serve, offload, tmp_path):
    model = load_model(folder("llama"))
    remote = offload(model, serve(folder("llama")))
    optimizer = remote.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    trainer = Trainer(model, arguments(tmp_path), train_dataset=DATA, optimizers=(optimizer, None))
    attach(trainer, remote)
    trainer.train()
    trainer.train()  # goes on with the same
    assert remote.step == 12


def test_trainer_under_bf16_autocast(folder, serve, offload, tmp_path):
    """Within the noise of bf16."""
    model, local = load_model(folder("llama")), load_model(folder("llama"))
    remote = offload(model, serve(folder("llama")))
    mine, theirs = make(model, tmp_path / "a", remote, bf16=True), make(local, tmp_path / "b", bf16=True)
    for trainer in (mine, theirs):
        trainer.train()
    assert_same_run(mine, theirs, bound=3e-2)


def test_fp16_on_a_cpu_is_f32(folder, serve, offload, tmp_path):
    """accelerate has neither autocast nor a GradScaler for it there, and says nothing; nor does the server's half."""
    model, local = load_model(folder("llama")), load_model(folder("llama"))
    remote = offload(model, serve(folder("llama")))
    mine = make(model, tmp_path / "a", remote, fp16=True)
    assert mine.accelerator.mixed_precision == "fp16" and mine.accelerator.scaler is None
    mine.train()
    assert remote.step == 6
    theirs = make(local, tmp_path / "b")
    theirs.train()
    assert_same_run(mine, theirs)


def test_fp16_as_on_an_accelerator(folder, serve, offload, tmp_path):
    """Autocast and a GradScaler, as accelerate sets them up there. The first scale overflows: both sides skip."""
    model, local = load_model(folder("llama")), load_model(folder("llama"))
    remote = offload(model, serve(folder("llama")))
    mine, theirs = make(model, tmp_path / "a", remote, fp16=True), make(local, tmp_path / "b", fp16=True)
    for trainer in (mine, theirs):
        trainer.accelerator.native_amp = True
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**19, backoff_factor=2.0**-6)
        trainer.train()
    scale = mine.accelerator.scaler.get_scale()
    assert scale == theirs.accelerator.scaler.get_scale() == 2.0**13
    assert remote.step == 5
    assert not math.isfinite(logged(mine, "grad_norm")[0])
    for name in ("loss", "grad_norm", "learning_rate"):
        assert logged(mine, name)[1:] == pytest.approx(logged(theirs, name)[1:], rel=1e-3), name


def test_resuming_takes_server_and_trainer_back_together(folder, serve, offload, tmp_path):
    """From the third update, in a new trainer, on a server that has gone on since and then died."""
    local = make(load_model(folder("llama")), tmp_path / "b", save_strategy="steps", save_steps=3)
    local.train()

    server = serve(folder("llama"))
    model = load_model(folder("llama"))
    remote = offload(model, server)
    make(model, tmp_path / "a", remote, save_strategy="steps", save_steps=3).train()
    assert_same_folders(tmp_path / "a" / "checkpoint-3", tmp_path / "b" / "checkpoint-3")
    remote.close()
    server.kill()
    server.start()

    model = load_model(folder("llama"))
    remote = offload(model, server, resume=True)
    resumed = make(model, tmp_path / "a", remote, save_strategy="steps", save_steps=3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert remote.step == 6
    assert_same_run(resumed, local)
    assert_same_folders(tmp_path / "a" / "checkpoint-6", tmp_path / "b" / "checkpoint-6")


def test_what_save_total_limit_deletes_is_deleted_on_the_server_too(folder, serve, offload, tmp_path):
    """Also of folders that an earlier process saved; and nothing else is."""
    server = serve(folder("llama"))
    model = load_model(folder("llama"))
    remote = offload(model, server)
    remote.save_checkpoint("of-another")
    saving = dict(save_strategy="steps", save_steps=2, save_total_limit=2)
    make(model, tmp_path / "a", remote, **saving).train()

    def kept():
        notes = (tmp_path / "a").glob("checkpoint-*/shardmlp.json")
        return {json.loads(note.read_text())["checkpoint"] for note in notes}

    assert {c.name for c in remote.checkpoints()} == {"of-another", "a-4", "a-6"} == {"of-another"} | kept()
    remote.close()
    model = load_model(folder("llama"))
    remote = offload(model, server, resume=True)
    resumed = make(model, tmp_path / "a", remote, num_train_epochs=2, **saving)
    resumed.train(resume_from_checkpoint=True)
    assert {c.name for c in remote.checkpoints()} == {"of-another", "a-10", "a-12"} == {"of-another"} | kept()


def test_checkpoints_that_the_trainer_deletes_at_once_leave_nothing(folder, serve, offload, tmp_path):
    """As where an earlier run's later ones are in its folder."""
    saving = dict(save_strategy="steps", save_steps=2, save_total_limit=2)
    model = load_model(folder("llama"))
    remote = offload(model, serve(folder("llama")))
    make(model, tmp_path / "a", remote, **saving).train()
    remote.close()
    model = load_model(folder("llama"))
    remote = offload(model, serve(folder("llama")))
    make(model, tmp_path / "a", remote, **saving).train()
    make(load_model(folder("llama")), tmp_path / "b", **saving).train()
    make(load_model(folder("llama")), tmp_path / "b", **saving).train()
    assert {f.name for f in (tmp_path / "a").iterdir()} == {f.name for f in (tmp_path / "b").iterdir()}
    notes = (tmp_path / "a").glob("checkpoint-*/shardmlp.json")
    assert {c.name for c in remote.checkpoints()} <= {json.loads(note.read_text())["checkpoint"] for note in notes}


def test_frozen_mlps_are_not_saved_and_resume(folder, serve, offload, tmp_path):
    """Nothing of the server's changes, so that one that can save nothing does too."""

    def run(server=None, **options):
        model = load_model(folder("llama"))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".mlp." not in name)
        remote = None if server is None else offload(model, server)
        out = tmp_path / ("local" if server is None else "remote")
        trainer = make(model, out, remote, save_strategy="steps", save_steps=3, **options)
        trainer.train(resume_from_checkpoint="num_train_epochs" in options)
        return trainer

    server = serve(folder("llama"), "--frozen")
    for options in ({}, {"num_train_epochs": 2}):
        assert_same_run(run(server, **options), run(**options))


def test_resuming_is_refused_without_the_servers_checkpoint(folder, serve, offload, tmp_path):
    server = serve(folder("llama"))
    model = load_model(folder("llama"))
    remote = offload(model, server)
    trainer = make(model, tmp_path / "a", remote, save_strategy="steps", save_steps=3)
    trainer.train()
    saved = tmp_path / "a" / "checkpoint-3"
    note = saved / "shardmlp.json"
    before = json.loads(note.read_text())

    note.write_text(json.dumps({**before, "checkpoint": "a-6"}))
    with pytest.raises(ValueError, match="saved at the server's step 3, and its checkpoint a-6 is of step 6"):
        trainer.train(resume_from_checkpoint=str(saved))
    note.write_text(json.dumps({"checkpoint": "a-6", "step": 6}))
    with pytest.raises(RuntimeError, match="mlp.gate_proj.weight: differs from the server's weights"):
        trainer.train(resume_from_checkpoint=str(saved))
    note.write_text(json.dumps({**before, "checkpoint": "gone"}))
    with pytest.raises(shardmlp.Error, match="gone"):
        trainer.train(resume_from_checkpoint=str(saved))
    note.unlink()
    with pytest.raises(ValueError, match="has no shardmlp.json"):
        trainer.train(resume_from_checkpoint=str(saved))


def test_best_model_at_the_end(folder, serve, offload, tmp_path):
    """The rate is so high that later updates are worse."""
    options = dict(
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="learning_rate_of_eval",
    )

    def best_is_the_first(_):
        counts.append(len(counts))
        return {"learning_rate_of_eval": -float(counts[-1])}

    model = load_model(folder("llama"))
    remote = offload(model, serve(folder("llama")))
    counts: list[int] = []
    trainer = make(model, tmp_path, remote, greater_is_better=True, **options)
    trainer.compute_metrics = best_is_the_first
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    assert remote.step == 2
    got, expected = remote.state_dict(), load_model(tmp_path / "checkpoint-2").state_dict()
    assert all(torch.equal(got[name], weights) for name, weights in expected.items())


class EndAttempt(TrainerCallback):
    """Calling it has the server end the open attempt of one update, as the loss of a server or a restore does."""

    def __init__(self, remote):
        self.remote = remote

    def __call__(self):
        client = self.remote._servers.connections[0].client
        client.save_checkpoint("now")
        client.restore_checkpoint("now")


@pytest.mark.parametrize("where", ["backward", "clip", "step"])
def test_step_that_was_aborted_is_done_again(folder, serve, offload, tmp_path, where):
    class End(EndAttempt):
        def on_substep_end(self, args, state, control, **kwargs):
            if where == "backward" and state.global_step == 2:
                self()

        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            if where == "step" and state.global_step == 2:
                self()

    model, local = load_model(folder("llama")), load_model(folder("llama"))
    remote = offload(model, serve(folder("llama")))
    end = End(remote)
    mine, theirs = make(model, tmp_path / "a", remote, callbacks=[end]), make(local, tmp_path / "b")
    if where == "clip":
        clip = mine.accelerator.clip_grad_norm_

        def end_and_clip(*args):
            if mine.state.global_step == 2:
                end()
            return clip(*args)

        mine.accelerator.clip_grad_norm_ = end_and_clip
    for trainer in (mine, theirs):
        trainer.train()
        trainer.save_model()
    assert remote.step == 6
    assert remote._servers.connections[0].session.position.attempt == 1
    assert logged(mine, "grad_norm") == pytest.approx(logged(theirs, "grad_norm"), rel=1e-5)
    assert_same_folders(tmp_path / "a", tmp_path / "b")


def test_step_that_is_aborted_again_and_again_is_given_up(folder, serve, offload, tmp_path):
    model = load_model(folder("llama"))
    remote = offload(model, serve(folder("llama")))
    trainer = make(model, tmp_path, remote)
    end = EndAttempt(remote)
    run, calls = trainer.compute_loss, []

    def compute_loss(*args, **kwargs):
        loss = run(*args, **kwargs)
        calls.append(loss)
        if len(calls) > 1:
            end()
        return loss

    trainer.compute_loss = compute_loss
    with pytest.raises(shardmlp.StepAborted):
        trainer.train()
    assert remote.step == 0


def test_attaching_another_model_is_refused(folder, serve, offload, tmp_path):
    remote = offload(load_model(folder("llama")), serve(folder("llama")))
    with pytest.raises(ValueError, match="not the one that was offloaded"):
        attach(Trainer(load_model(folder("llama")), arguments(tmp_path), train_dataset=DATA), remote)
    with pytest.raises(TypeError, match="got a Linear, expected a transformers.Trainer"):
        attach(torch.nn.Linear(1, 1), remote)


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    words = {f"w{i}": i for i in range(61)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), pad_token="w0", eos_token="w1"
    )


def test_sft_trainer(folder, serve, offload, tmp_path):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in DATA])
    model, local = load_model(folder("llama")), load_model(folder("llama"))
    remote = offload(model, serve(folder("llama")))

    def run(model, out, remote=None):
        shutil.rmtree(out, ignore_errors=True)
        config = SFTConfig(**{**arguments(out).to_dict(), "max_length": 16, "packing": False})
        trainer = SFTTrainer(model, config, train_dataset=data, processing_class=tokenizer())
        if remote is not None:
            attach(trainer, remote)
        trainer.train()
        trainer.save_model()
        return trainer

    mine, theirs = run(model, tmp_path / "a", remote), run(local, tmp_path / "b")
    assert remote.step == 6
    assert_same_run(mine, theirs)
    assert_same_folders(tmp_path / "a", tmp_path / "b")
