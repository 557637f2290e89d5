"""A server's gradients under everything that trainers do with gradients, against a local twin."""

from __future__ import annotations

import pytest
import torch
from models import load_model, loss_of, relative, train

import shardmlp


def drop(model):
    for p in model.parameters():
        p.grad = None


def zero(model):
    for p in model.parameters():
        p.grad.zero_()


def zero_at_once(model):
    torch._foreach_zero_([p.grad for p in model.parameters()])


@pytest.mark.parametrize("clear", [drop, zero, zero_at_once])
def test_gradients_cleared_by_hand_are_not_counted(twins, clear):
    """Before a step, and after it."""
    twins.optimize(torch.optim.SGD, lr=0.2)
    for model, optimizer in twins.each():
        loss_of(model, 7).backward()
        clear(model)
        for seed in (1, 2):
            loss_of(model, seed).backward()
        optimizer.step()
        clear(model)
        loss_of(model, 3).backward()
        optimizer.step()
    assert twins.difference() < 1e-5
    assert twins.remote.step == 2


def halve(model):
    for p in model.parameters():
        p.grad /= 2


def halve_at_once(model):
    torch._foreach_mul_([p.grad for p in model.parameters()], 0.5)


def halve_into_others(model):
    for p in model.parameters():
        p.grad = 0.5 * p.grad


@pytest.mark.parametrize("scale", [halve, halve_at_once, halve_into_others])
def test_gradients_scaled_by_hand(twins, scale):
    twins.optimize(torch.optim.SGD, lr=0.2)
    for seed in (1, 2):
        for model, optimizer in twins.each():
            loss_of(model, seed).backward()
            scale(model)
            optimizer.step()
            optimizer.zero_grad()
    assert twins.difference() < 1e-5


def test_zeros_in_place_of_gradients(twins):
    """The optimizer steps on them, whatever backward gave before."""
    twins.optimize(torch.optim.SGD, lr=0.2, momentum=0.9)
    for seed in (1, 2):
        for model, optimizer in twins.each():
            loss_of(model, seed).backward()
            if seed == 2:
                zero(model)
            optimizer.step()
            optimizer.zero_grad()
    assert twins.difference() < 1e-5


def test_one_of_the_servers_gradients_dropped_before_the_step(twins):
    """That tensor gets no update; the others do."""
    twins.optimize(torch.optim.AdamW, lr=1e-3)
    for model, optimizer in twins.each():
        loss_of(model, 1).backward()
        model.model.layers[1].mlp.up_proj.weight.grad = None
        optimizer.step()
    assert twins.difference() < 1e-4


def test_norms_are_those_of_a_local_model(twins):
    for model in (twins.model, twins.local):
        loss_of(model, 1).backward()
    for mine, theirs in zip(twins.model.parameters(), twins.local.parameters()):
        assert mine.grad.norm().item() == pytest.approx(theirs.grad.norm().item(), rel=1e-4)


@pytest.mark.parametrize(
    "use, message",
    [
        (lambda p: p.grad.abs(), "gradient of model.layers.0.mlp.up_proj.weight is on the server.*got aten.abs"),
        (lambda p: p.grad.norm(1), "which has its whole 2-norm; got norm 1"),
        (lambda p: p.grad.norm(dim=0), "got norm 2.* over dimension"),
        (lambda p: p.grad.isnan(), "has NaNs shows in its norm"),
        (lambda p: p.grad.add_(torch.zeros(0)), "nothing can be added to the gradient of model.layers.0.mlp.up_proj"),
        (lambda p: p.grad.add_(p.grad), "nothing can be added"),
        (lambda p: p.grad.mul_(torch.ones(2)), "with one number"),
        (lambda p: torch.nn.utils.clip_grad_value_([p], 1.0), "got aten"),
        (lambda p: torch.optim.AdamW([p]).step(), "given to Remote.wrap"),
    ],
)
def test_what_a_server_does_not_do_with_a_gradient_is_refused(twins, use, message):
    twins.optimize(torch.optim.SGD, lr=0.2)
    for model in (twins.model, twins.local):
        loss_of(model, 1).backward()
    with pytest.raises(TypeError, match=message):
        use(twins.model.model.layers[0].mlp.up_proj.weight)
    for _, optimizer in twins.each():
        optimizer.step()
    assert twins.difference() < 1e-5


def test_some_dropped_and_backward_again_is_refused(twins):
    twins.optimize(torch.optim.SGD, lr=0.2)
    loss_of(twins.model, 1).backward()
    twins.model.model.layers[1].mlp.up_proj.weight.grad = None
    with pytest.raises(shardmlp.Error, match=r"layers.1.mlp.up_proj.weight was dropped and .* call zero_grad\(\)"):
        loss_of(twins.model, 2).backward()
    twins.mine.zero_grad()
    twins.step(1)
    assert twins.difference() < 1e-5


def test_backward_into_scaled_gradients_is_refused(twins):
    twins.optimize(torch.optim.SGD, lr=0.2)
    loss_of(twins.model, 1).backward()
    halve(twins.model)
    with pytest.raises(shardmlp.Error, match="was scaled, by 0.5"):
        loss_of(twins.model, 2).backward()


def test_gradients_scaled_apart_are_refused(twins):
    twins.optimize(torch.optim.SGD, lr=0.2)
    loss_of(twins.model, 1).backward()
    twins.model.model.layers[1].mlp.up_proj.weight.grad *= 0.5
    before = twins.remote.local_state_dict()["model.norm.weight"].clone()
    with pytest.raises(shardmlp.Error, match="scales all of its gradients alike"):
        twins.mine.step()
    assert torch.equal(twins.model.model.norm.weight, before)


def test_autograd_grad_of_the_servers_tensors_is_refused(twins):
    weight = twins.model.model.layers[1].mlp.up_proj.weight
    with pytest.raises(shardmlp.Error, match="up_proj.weight stays on the server and can't be returned: use backward"):
        torch.autograd.grad(loss_of(twins.model, 1), weight)


def test_moments_of_an_ordinary_checkpoint_are_refused_before_anything_is_committed(twins):
    twins.optimize(torch.optim.AdamW, lr=1e-3)
    twins.step(1)
    twins.mine.load_state_dict(twins.theirs.state_dict())
    loss_of(twins.model, 2).backward()
    with pytest.raises(ValueError, match="exp_avg .* of model.layers.0.mlp.gate_proj.weight"):
        twins.mine.step()
    assert twins.remote.step == 1


def freeze_one(twins, when):
    """Two micro-batches, down_proj of one layer frozen in one of them."""
    weight = twins.model.model.layers[1].mlp.down_proj.weight
    for seed in range(2):
        weight.requires_grad_(seed != when)
        loss_of(twins.model, seed).backward()
    weight.requires_grad_(True)


def backward_into_some(twins):
    loss_of(twins.model, 1).backward()
    loss_of(twins.model, 2).backward(inputs=[layer.mlp.up_proj.weight for layer in twins.model.model.layers])


@pytest.mark.parametrize(
    "accumulate",
    [
        pytest.param(lambda twins: freeze_one(twins, 0), id="frozen in the first micro-batch"),
        pytest.param(lambda twins: freeze_one(twins, 1), id="frozen in the second"),
        pytest.param(backward_into_some, id="backward into some of a layer's"),
    ],
)
@pytest.mark.parametrize("clip", [False, True])
def test_gradient_that_not_every_backward_added_to_is_refused(twins, accumulate, clip):
    """The server adds to all of a layer's."""
    twins.optimize(torch.optim.SGD, lr=0.2)
    accumulate(twins)
    with pytest.raises(shardmlp.Error, match="and not to its own"):
        if clip:
            torch.nn.utils.clip_grad_norm_(twins.model.parameters(), 1.0)
        twins.mine.step()
    twins.mine.zero_grad()
    twins.step(1)
    assert twins.difference() < 1e-5


def test_gradients_given_to_other_parameters_are_refused(twins):
    twins.optimize(torch.optim.SGD, lr=0.2)
    loss_of(twins.model, 1).backward()
    a, b = (layer.mlp.up_proj.weight for layer in list(twins.model.model.layers)[:2])
    a.grad, b.grad = b.grad, a.grad
    with pytest.raises(TypeError, match="layers.0.mlp.up_proj.weight was given the gradient of .*layers.1"):
        twins.mine.step()


def test_tensors_that_the_optimizer_does_not_hold(folder, serve, offload):
    """They get no update, however their gradients are left, clipped apart and unscaled apart."""
    model, local = load_model(folder("llama")), load_model(folder("llama"))
    remote = offload(model, serve(folder("llama")))
    scalers = []
    for m in (model, local):
        held = [p for name, p in m.named_parameters() if "layers.0.mlp" not in name]
        optimizer = torch.optim.SGD(held, lr=0.2)
        if m is model:
            remote.wrap(optimizer)
        scalers.append((m, held, optimizer, torch.amp.GradScaler("cpu", init_scale=16.0)))
    for seed in range(3):
        for m, held, optimizer, scaler in scalers:
            scaler.scale(loss_of(m, seed)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(held, 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    mine = remote.state_dict()
    assert max(relative(mine[name], weights) for name, weights in local.state_dict().items()) < 1e-5


def test_backward_after_clipping_says_what_sealed_the_step(twins):
    twins.optimize(torch.optim.SGD, lr=0.2)
    loss_of(twins.model, 1).backward()
    torch.nn.utils.clip_grad_norm_(twins.model.parameters(), 1.0)
    with pytest.raises(shardmlp.Error, match="the norm of its gradients was asked for"):
        loss_of(twins.model, 2).backward()


def test_anomaly_detection_and_norms_of_many(twins):
    twins.optimize(torch.optim.SGD, lr=0.2)
    for model, optimizer in twins.each():
        with torch.autograd.detect_anomaly(check_nan=True):
            loss_of(model, 1).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
        norms = torch._foreach_norm([p.grad for p in model.parameters()])
        assert torch.stack(norms).norm().item() == pytest.approx(0.5, rel=1e-4)
        optimizer.step()
    assert twins.difference() < 1e-5


def test_scaler_whose_step_was_aborted_has_to_be_updated_first(twins):
    """It takes the gradients of the next try for unscaled."""
    twins.optimize(torch.optim.SGD, lr=0.2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    client = twins.remote._servers.connections[0].client

    def run(abort):
        scaler.scale(loss_of(twins.model, 1)).backward()
        if abort:
            scaler.unscale_(twins.mine)
            client.save_checkpoint("now")
            client.restore_checkpoint("now")
        scaler.step(twins.mine)

    with pytest.raises(shardmlp.StepAborted):
        run(abort=True)
    with pytest.raises(shardmlp.Error, match=r"call its update\(\) before"):
        run(abort=False)
    twins.mine.zero_grad()
    scaler.update()
    run(abort=False)
    loss_of(twins.local, 1).backward()
    twins.theirs.step()
    assert twins.difference() < 1e-5


SCALED = [
    (torch.optim.SGD, dict(lr=0.2)),
    (torch.optim.AdamW, dict(lr=1e-3)),
    (torch.optim.AdamW, dict(lr=1e-3, fused=True)),
]


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("kind, options", SCALED)
def test_grad_scaler(twins, kind, options, clip):
    """Scaled losses, one of which overflows: both sides skip that step, and the scale falls and rises as for a local
    model."""
    twins.optimize(kind, **options)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in range(2)]
    scales = []
    for seed in range(6):
        for (model, optimizer), scaler in zip(twins.each(), scalers):
            loss = loss_of(model, seed) * (1e38 if seed == 2 else 1)
            scaler.scale(loss).backward()
            if clip:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        scales.append([scaler.get_scale() for scaler in scalers])
    assert scales[2][0] < scales[1][0] < scales[-1][0] * 4
    assert all(mine == theirs for mine, theirs in scales)
    assert twins.remote.step == 5
    assert twins.difference() < 1e-4


def test_grad_scaler_skips_where_the_trainers_half_alone_is_not_finite(twins):
    twins.optimize(torch.optim.SGD, lr=0.2)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**4) for _ in range(2)]
    for seed in range(3):
        for (model, optimizer), scaler in zip(twins.each(), scalers):
            scaler.scale(loss_of(model, seed)).backward()
            if seed == 1:
                model.get_input_embeddings().weight.grad[3, 5] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0**3
    assert twins.remote.step == 2
    assert twins.difference() < 1e-5


def test_grad_scaler_skips_where_the_servers_half_alone_is_not_finite(twins):
    """dY of one MLP overflows, and x gets no gradient of it."""
    twins.optimize(torch.optim.SGD, lr=0.2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    before = {name: weights.clone() for name, weights in twins.remote.state_dict().items()}
    (twins.model.model.layers[1].mlp(torch.ones(2, 48)) * float("inf")).sum().backward()
    scaler.scale(loss_of(twins.model, 1)).backward()
    scaler.step(twins.mine)
    scaler.update()
    assert scaler.get_scale() == 2.0**3
    assert twins.remote.step == 0
    assert all(torch.equal(before[name], weights) for name, weights in twins.remote.state_dict().items())


def test_optimizer_that_is_new_starts_without_the_servers_old_state(folder, serve, offload, tmp_path):
    """A second run on a server that has trained: its first step is that of a new AdamW, and one of SGD after it too."""
    server = serve(folder("llama"))
    model = load_model(folder("llama"))
    remote = offload(model, server)
    optimizer = remote.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))
    train(model, optimizer, range(3))
    model.save_pretrained(tmp_path)
    remote.close()

    for kind, options in ((torch.optim.AdamW, dict(lr=1e-3)), (torch.optim.SGD, dict(lr=0.1, momentum=0.9))):
        model, local = load_model(tmp_path), load_model(tmp_path)
        remote = offload(model, server)
        for m, optimizer in (
            (model, remote.wrap(kind(model.parameters(), **options))),
            (local, kind(local.parameters(), **options)),
        ):
            train(m, optimizer, (5, 6))
        mine = remote.state_dict()
        assert max(relative(mine[name], weights) for name, weights in local.state_dict().items()) < 1e-4
        model.save_pretrained(tmp_path)
        remote.close()


def test_another_optimizers_state_is_not_gone_on_with(folder, serve, offload):
    server = serve(folder("llama"))
    model = load_model(folder("llama"))
    remote = offload(model, server)
    optimizer = remote.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))
    loss_of(model, 1).backward()
    optimizer.step()
    remote.save_checkpoint("adamw")
    remote.close()
    server.kill()
    server.start()

    model = load_model(folder("llama"))
    remote = offload(model, server, resume=True)
    remote.restore("adamw")
    optimizer = remote.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    loss_of(model, 1).backward()
    with pytest.raises(shardmlp.Error, match="has the moments of 1 updates by adamw, got sgd") as failure:
        optimizer.step()
    assert failure.value.reason == "OPTIMIZER_MISMATCH"
    assert remote.step == 1


def test_weights_that_are_not_the_servers_are_refused_by_name(folder, serve, offload):
    """However little they differ, and whichever side is rounded."""
    server = serve(folder("llama"))
    model = load_model(folder("llama"))
    weight = model.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        weight[3, 4] += weight[3, 4].abs() * 1e-6
    with pytest.raises(ValueError, match="layers.1.mlp.up_proj.weight: its weights are not those of the server's"):
        offload(model, server)
    offload(load_model(folder("llama"), torch.bfloat16), server).close()
    offload(load_model(folder("llama")), serve(folder("llama"), "--dtype=bf16"))


def test_model_of_another_step_is_refused_unless_it_resumes(folder, serve, offload):
    server = serve(folder("llama"))
    model = load_model(folder("llama"))
    remote = offload(model, server)
    optimizer = remote.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    loss_of(model, 1).backward()
    optimizer.step()
    remote.close()
    with pytest.raises(ValueError, match="it is at step 1. .*resume=True"):
        offload(load_model(folder("llama")), server)
    assert offload(load_model(folder("llama")), server, resume=True).step == 1


def test_state_dict_of_a_reader_never_mixes_two_steps(folder, serve, offload, monkeypatch):
    """A step is committed between two of its tensors."""
    server = serve(folder("llama"))
    model, evaluated = load_model(folder("llama")), load_model(folder("llama"))
    remote = offload(model, server)
    optimizer = remote.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    reader = offload(evaluated.requires_grad_(False), server)
    read = type(reader._servers.connections[0]).read_tensor
    reads = []

    def read_and_step(connection, tensor):
        reads.append(tensor.name)
        if len(reads) == 3:
            loss_of(model, 1).backward()
            optimizer.step()
        return read(connection, tensor)

    monkeypatch.setattr(type(reader._servers.connections[0]), "read_tensor", read_and_step)
    with pytest.raises(shardmlp.Error, match="weights changed while state_dict") as failure:
        reader.state_dict()
    assert failure.value.reason == "WEIGHTS_CHANGED"
    state = reader.state_dict()
    mine = remote.state_dict()
    assert all(torch.equal(state[name], weights) for name, weights in mine.items() if ".mlp." in name)
