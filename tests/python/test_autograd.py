"""A remote MLP in a graph: shapes, layouts, what needs gradients and how often, autocast, checkpointing, compile."""

from __future__ import annotations

import pytest
import torch
from models import load_model, relative
from torch.utils.checkpoint import checkpoint

import shardmlp

F32 = 1e-5
WEIGHTS = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")


class Pair:
    """A remote MLP, its local twin, and an optimizer for each that shows the gradients."""

    def __init__(self, folder, serve, offload, *flags, frozen=()):
        self.model, local = load_model(folder("llama")), load_model(folder("llama"))
        for name in frozen:
            self.model.model.layers[1].mlp.get_parameter(name).requires_grad_(False)
        self.remote = offload(self.model, serve(folder("llama"), *flags))
        self.mlp, self.twin = self.model.model.layers[1].mlp, local.model.layers[1].mlp
        self.optimizer = self.remote.wrap(torch.optim.SGD(self.model.parameters(), lr=1.0))

    @property
    def pending(self) -> int:
        return self.remote._servers.pending_row_count

    def weights(self):
        state = self.remote.state_dict()
        return {name: state[f"model.layers.1.mlp.{name}"] for name in WEIGHTS}

    def assert_same(self, x, dy):
        """Forward and backward of ``x`` as it lies in memory."""
        mine, theirs = x.detach().requires_grad_(), x.clone().requires_grad_()
        y, expected = self.mlp(mine), self.twin(theirs)
        y.backward(dy)
        expected.backward(dy)
        assert relative(y, expected) < F32
        assert relative(mine.grad, theirs.grad) < F32
        self.assert_same_weight_gradients()

    def assert_same_weight_gradients(self, bound=5e-5):
        before = self.weights()
        self.optimizer.step()
        after = self.weights()
        for name in WEIGHTS:
            expected = self.twin.get_parameter(name).grad
            assert (
                relative(before[name] - after[name], torch.zeros_like(before[name]) if expected is None else expected)
                < bound
            ), name


@pytest.fixture
def pair(folder, serve, offload):
    return Pair(folder, serve, offload)


@pytest.mark.parametrize("shape", [(48,), (1, 48), (5, 48), (2, 125, 48), (3, 1, 2, 48), (0, 48), (2, 0, 48)])
def test_any_leading_dimensions(pair, shape):
    pair.assert_same(torch.randn(shape), torch.randn(shape))


LAYOUTS = {
    "transposed": lambda: torch.randn(48, 6).t(),
    "every other row": lambda: torch.randn(12, 48)[::2],
    "every other column": lambda: torch.randn(6, 96)[:, ::2],
    "a part of wider rows": lambda: torch.randn(6, 96)[:, 20:68],
    "one row repeated": lambda: torch.randn(1, 48).expand(6, 48),
    "one value repeated": lambda: torch.randn(1, 1).expand(6, 48),
    "batch and sequence swapped": lambda: torch.randn(3, 2, 48).transpose(0, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_non_contiguous_input_and_output_gradient(pair, layout):
    pair.assert_same(LAYOUTS[layout](), LAYOUTS[layout]())


def test_wrong_width_and_dtype_are_refused_here(pair):
    with pytest.raises(ValueError, match=r"model.layers.1.mlp: got x \[3, 47\], expected \[..., 48\]"):
        pair.mlp(torch.randn(3, 47))
    with pytest.raises(TypeError, match="int64"):
        pair.mlp(torch.ones(3, 48, dtype=torch.int64))


def test_input_needs_no_gradient_and_weights_do(pair):
    x = torch.randn(4, 48)
    pair.mlp(x).sum().backward()
    pair.twin(x).sum().backward()
    assert pair.pending == 4
    pair.assert_same_weight_gradients()


def test_input_needs_a_gradient_and_weights_do_not(folder, serve, offload):
    pair = Pair(folder, serve, offload, frozen=WEIGHTS)
    x = torch.randn(4, 48, requires_grad=True)
    pair.mlp(x).sum().backward()
    (expected,) = torch.autograd.grad(pair.twin(x).sum(), x)
    assert relative(x.grad, expected) < F32
    assert pair.pending == 0


def test_neither_needs_a_gradient(folder, serve, offload):
    pair = Pair(folder, serve, offload, frozen=WEIGHTS)
    y = pair.mlp(torch.randn(4, 48))
    assert not y.requires_grad


def test_no_grad_keeps_nothing(pair):
    x = torch.randn(4, 48, requires_grad=True)
    with torch.no_grad():
        y = pair.mlp(x)
    assert not y.requires_grad and y.grad_fn is None
    with torch.inference_mode():
        assert relative(pair.mlp(x), y) == 0


def test_some_tensors_of_a_layer_are_frozen(folder, serve, offload):
    pair = Pair(folder, serve, offload, frozen=["up_proj.weight"])
    x = torch.randn(4, 48)
    pair.mlp(x).sum().backward()
    pair.twin(x).sum().backward()
    pair.twin.up_proj.weight.grad = None
    pair.assert_same_weight_gradients()


def test_backward_twice_adds_twice(pair):
    x = torch.randn(4, 48, requires_grad=True)
    for mlp in (pair.mlp, pair.twin):
        x.grad = None
        loss = mlp(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        if mlp is pair.mlp:
            mine = x.grad
    assert relative(mine, x.grad) < F32
    assert pair.pending == 8
    pair.assert_same_weight_gradients()


def test_gradients_add_over_micro_batches(pair):
    for rows in (3, 1, 5):
        x = torch.randn(rows, 48)
        pair.mlp(x).square().sum().backward()
        pair.twin(x).square().sum().backward()
    assert pair.pending == 9
    pair.assert_same_weight_gradients()


def test_gradients_that_are_returned_are_not_added(pair):
    """As torch.autograd.grad() and backward(inputs=...) leave .grad of other parameters alone."""
    x = torch.randn(4, 48, requires_grad=True)
    (expected,) = torch.autograd.grad(pair.twin(x).sum(), x)
    (got,) = torch.autograd.grad(pair.mlp(x).sum(), x)
    pair.mlp(x).sum().backward(inputs=[x])
    assert relative(got, expected) < F32 and relative(x.grad, expected) < F32
    assert pair.pending == 0


def test_second_derivatives_are_refused(pair):
    x = torch.randn(4, 48, requires_grad=True)
    with pytest.raises(shardmlp.Error, match="model.layers.1.mlp: a remote MLP can't be differentiated twice"):
        torch.autograd.grad(pair.mlp(x).sum(), x, create_graph=True)
    assert pair.pending == 0


def test_autocast_in_forward_alone(pair):
    """The output has autocast's dtype, and backward computes from the rounded x, wherever it runs."""
    x = torch.randn(6, 48, requires_grad=True)
    dy = torch.randn(6, 48).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = pair.mlp(x)
    assert y.dtype == torch.bfloat16
    y.backward(dy)
    rounded = x.detach().bfloat16().float().requires_grad_()
    expected = pair.twin(rounded)
    expected.backward(dy.float())
    assert relative(y.float(), expected) < 2**-7
    assert x.grad.dtype == torch.float32 and relative(x.grad, rounded.grad) < 2**-7
    pair.assert_same_weight_gradients()  # the server's sums are f32, of exactly these x and dy


def test_autocast_leaves_f64_alone(folder, serve, offload):
    pair = Pair(folder, serve, offload, "--dtype=f64")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert pair.mlp(torch.randn(2, 48, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(pair, reentrant):
    x = torch.randn(4, 48)
    grads = []
    for mlp in (pair.mlp, pair.twin):
        leaf = x.clone().requires_grad_()
        y = checkpoint(lambda h: mlp(h.sin()).cos(), leaf, use_reentrant=reentrant)
        y.square().sum().backward()
        grads.append(leaf.grad)
    assert relative(*grads) < F32
    assert pair.pending == 4
    pair.assert_same_weight_gradients()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_recomputed_after_a_commit_uses_the_new_weights(pair, reentrant):
    """What is recomputed is recomputed with the weights of now, so backward has to quote their version with it."""
    x = torch.randn(4, 48, requires_grad=True)
    y = checkpoint(pair.mlp, x, use_reentrant=reentrant)
    pair.mlp(torch.randn(2, 48)).sum().backward()
    pair.optimizer.step()
    pair.optimizer.zero_grad()
    with torch.no_grad():
        for name, weights in pair.weights().items():
            pair.twin.get_parameter(name).copy_(weights)
    y.sum().backward()
    (expected,) = torch.autograd.grad(pair.twin(x).sum(), x)
    assert relative(x.grad, expected) < F32


def test_backward_after_a_commit_is_refused(pair):
    x = torch.randn(4, 48, requires_grad=True)
    y = pair.mlp(x)
    pair.mlp(torch.randn(2, 48)).sum().backward()
    pair.optimizer.step()
    pair.optimizer.zero_grad()
    with pytest.raises(shardmlp.Error) as failure:
        y.sum().backward()
    assert failure.value.code == "FAILED_PRECONDITION" and failure.value.reason == "STALE_WEIGHTS"


def test_saved_tensor_hooks_move_x_and_its_version_together(pair):
    x = torch.randn(4, 48, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        y = pair.mlp(x)
    y.sum().backward()
    (expected,) = torch.autograd.grad(pair.twin(x).sum(), x)
    assert relative(x.grad, expected) < F32


def test_torch_compile(pair):
    """x needs no gradient: backward runs all the same."""
    x = torch.randn(4, 48)

    def around(mlp):
        return lambda x: mlp(x.sin()).cos().sum()

    loss = torch.compile(around(pair.mlp), backend="aot_eager")(x)
    expected = around(pair.twin)(x)
    loss.backward()
    expected.backward()
    assert relative(loss, expected) < F32
    assert pair.pending == 4
    pair.assert_same_weight_gradients()
