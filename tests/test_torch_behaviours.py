"""What torch's own tests expect of a checkpoint, expected of ours: with adapters switched before backward.

Read as a list of behaviours: TestCheckpoint in torch's test/test_utils.py and the checkpointing tests of
test/test_autograd.py. What other files here test already is not repeated.
"""

import gc
import weakref
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError, CheckpointPolicy, create_selective_checkpoint_contexts

from mmadapt import AdapterBank, CheckpointPlan, checkpoint, run_blocks
from tests.programs import make_bank, make_tokens

MODES = pytest.mark.parametrize("reentrant", [False, True])


@pytest.fixture
def bank() -> AdapterBank:
    return make_bank()


def gradients(bank: AdapterBank) -> list[Tensor]:
    got = [p.grad.clone() for p in bank.backbone.parameters() if p.grad is not None]
    bank.backbone.zero_grad(set_to_none=True)
    return got


def run(bank: AdapterBank, function, *args, reentrant: bool | None = None, **options):
    """`function` under the route of rgb, checkpointed unless `reentrant` is None."""
    torch.manual_seed(0)
    with bank.active("rgb"):
        if reentrant is None:
            return function(*args)
        return checkpoint(function, *args, use_reentrant=reentrant, modules=bank.backbone.blocks, **options)


def backward(bank: AdapterBank, output: Tensor) -> list[Tensor]:
    with bank.active("depth"):
        output.square().sum().backward()
    return gradients(bank)


# ---- arguments and results


@MODES
def test_what_is_no_tensor_goes_in_and_comes_out(bank, reentrant):
    block = bank.backbone.blocks[0]

    def function(x: Tensor, scale: int, other: None, y: Tensor):
        z = block(x) * scale
        return scale, z, None, True, (z + y, "text"), x

    def both(reentrant: bool | None) -> tuple:
        x = make_tokens(requires_grad=True)["rgb"]
        out = run(bank, function, x, 3, None, torch.ones_like(x), reentrant=reentrant)
        with bank.active("depth"):
            (out[1].sum() + out[4][0].square().sum() + out[5].sum()).backward()
        return out, [*gradients(bank), x.grad]

    (got, got_gradients), (expected, expected_gradients) = both(reentrant), both(None)
    assert (got[0], got[2], got[3], got[4][1]) == (3, None, True, "text")
    for i in (1, 5):
        assert torch.equal(got[i], expected[i])
    assert len(got_gradients) == len(expected_gradients) == 5
    assert all(map(torch.equal, got_gradients, expected_gradients))


@MODES
def test_no_tensor_at_all(reentrant):
    function = lambda a, b: (a + b, None, "text")  # noqa: E731
    assert checkpoint(function, 1, 2, modules=(), use_reentrant=reentrant) == (3, None, "text")


@MODES
def test_outputs_of_which_none_needs_grad(bank, reentrant):
    """torch says so in backward of its reentrant mode; here there is nothing to call backward on, or a zero one."""
    x, y = torch.randn(1, 4), torch.randn(1, 4, requires_grad=True)
    out = checkpoint(lambda a, b: a * 2, x, y, modules=(), use_reentrant=reentrant)
    assert torch.equal(out, x * 2)
    if reentrant:
        with pytest.raises(RuntimeError, match="none of output has requires_grad=True"):
            out.sum().backward()
    else:
        assert not out.requires_grad


@MODES
def test_a_second_backward_of_a_freed_graph_is_refused(bank, reentrant):
    out = run(bank, bank.backbone.blocks[0], make_tokens(requires_grad=True)["rgb"], reentrant=reentrant)
    with bank.active("depth"):
        out.sum().backward()
        with pytest.raises(RuntimeError, match=r"backward through the graph a second time|already been freed"):
            out.sum().backward()


def test_a_gradient_of_a_gradient_in_reentrant_mode_is_refused_as_torch_does(bank):
    x = make_tokens(requires_grad=True)["rgb"]
    out = run(bank, bank.backbone.blocks[0], x, reentrant=True)
    with pytest.raises(RuntimeError, match=r"use_reentrant=True|\.grad\(\)"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


@MODES
def test_a_parameter_used_inside_and_outside(bank, reentrant):
    block = bank.backbone.blocks[0]
    weight = block.attn.qkv.lora_A["rgb_ft"].weight

    def both(reentrant: bool | None) -> list[Tensor]:
        x = make_tokens(requires_grad=True)["rgb"]
        return backward(bank, run(bank, block, x * weight.sum(), reentrant=reentrant) + weight.square().mean())

    got, expected = both(reentrant), both(None)
    assert len(got) == 4
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-6, atol=1e-6)  # one parameter summed in another order


@MODES
def test_an_output_that_is_an_input(bank, reentrant):
    block = bank.backbone.blocks[0]

    def both(reentrant: bool | None) -> list[Tensor]:
        x = make_tokens(requires_grad=True)["rgb"]
        same, out = run(bank, lambda x: (x, block(x)), x, reentrant=reentrant)
        return [*backward(bank, same + out), x.grad]

    assert all(map(torch.equal, both(reentrant), both(None)))


class Cube(torch.autograd.Function):
    """Saves an input and an output, as functions of users do."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        y = x.square()
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[override]
        x, y = ctx.saved_tensors
        return grad * (2 * y + x.square())


@MODES
def test_functions_of_users_with_saved_tensors(bank, reentrant):
    block = bank.backbone.blocks[0]
    function = lambda x: Cube.apply(block(Cube.apply(x)))  # noqa: E731

    def both(reentrant: bool | None) -> list[Tensor]:
        x = make_tokens(requires_grad=True)["rgb"]
        return [*backward(bank, run(bank, function, x, reentrant=reentrant)), x.grad]

    assert all(map(torch.equal, both(reentrant), both(None)))


# ---- when it recomputes, and what it holds


@MODES
def test_each_block_runs_once_more_and_only_when_backward_comes(bank, reentrant):
    calls: Counter = Counter()
    for i, block in enumerate(bank.backbone.blocks):
        block.register_forward_pre_hook(lambda *_, i=i: calls.update([i]))
    plan = CheckpointPlan(segments=2, last_plain=True, use_reentrant=reentrant)  # as checkpoint_sequential does
    with bank.active("rgb"):
        out = run_blocks(bank.backbone.blocks, make_tokens(requires_grad=True)["rgb"], plan=plan)
    assert calls == {0: 1, 1: 1, 2: 1, 3: 1}
    backward(bank, out)
    assert calls == {0: 2, 1: 2, 2: 1, 3: 1}


def test_a_second_backward_through_a_retained_graph_recomputes_again(bank):
    block, calls = bank.backbone.blocks[0], []
    block.register_forward_pre_hook(lambda *_: calls.append(1))
    out = run(bank, block, make_tokens(requires_grad=True)["rgb"], reentrant=False)
    for _ in range(2):
        out.sum().backward(retain_graph=True)
    assert len(calls) == 3


class Live(TorchDispatchMode):
    """The most bytes alive at a time among the results of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.untyped_storage().nbytes() > 1000:
            size = out.untyped_storage().nbytes()
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(out, self.free, size)
        return out

    def free(self, size: int) -> None:
        self.now -= size


@pytest.mark.parametrize("retain", [False, True])
def test_what_is_recomputed_is_freed_as_backward_goes(retain):
    """A chain of n operations: with the graph retained or not, the peak in backward is that of one recomputation."""
    x = torch.randn(1000, requires_grad=True)

    def chain(x: Tensor) -> Tensor:
        for _ in range(8):
            x = x.sin()
        return x

    loss = checkpoint(chain, checkpoint(chain, x, modules=()), modules=()).sum()
    gc.collect()
    with Live() as live:
        loss.backward(retain_graph=retain)
    assert live.peak <= 13 * 4000  # eight of one chain, its gradients; both chains would be sixteen and more


# ---- complaints


class Fickle(nn.Module):
    """Another number, or another shape, of saved tensors at each call."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls = how, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.how == "number" and self.calls > 1:
            return x.sin()
        return (x.sin().sin() if self.calls == 1 else x[:1].sin().sin()) if self.how == "shape" else x.sin().sin()


@pytest.mark.parametrize(
    ("how", "options", "message"),
    [
        ("number", {}, "different number of tensors|A different number"),
        ("shape", {}, "different metadata"),
    ],
)
def test_another_computation_is_noticed(bank, how, options, message):
    block, fickle = bank.backbone.blocks[0], Fickle(how)
    function = lambda x: fickle(block(x))  # noqa: E731
    out = run(bank, function, make_tokens(requires_grad=True)["rgb"], reentrant=False, **options)
    with bank.active("depth"), pytest.raises(CheckpointError, match=message):
        out.sum().backward()


def test_the_check_can_be_left_out(bank):
    """`determinism_check="none"`: another shape is not compared."""
    fickle = Fickle("shape")
    x = torch.randn(1, 3, requires_grad=True)
    checkpoint(fickle, x, modules=(), determinism_check="none").sum().backward()
    assert x.grad is not None
    assert fickle.calls == 2


def test_an_error_in_a_forward_leaves_later_ones_right(bank):
    block = bank.backbone.blocks[0]

    def fails(x: Tensor) -> Tensor:
        block(x)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(bank, fails, make_tokens(requires_grad=True)["rgb"], reentrant=False)
    x = make_tokens(requires_grad=True)["rgb"]
    got = backward(bank, run(bank, block, x, reentrant=False))
    assert all(map(torch.equal, got, backward(bank, run(bank, block, make_tokens(requires_grad=True)["rgb"]))))


# ---- selective checkpointing


def save_products(ctx, op, *args, **kwargs) -> CheckpointPolicy:
    kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kept", [True, False])
def test_kept_outputs_are_not_computed_again(bank, kept):
    """Counted: with products kept, backward of a block runs only those that are gradients."""
    block, x = bank.backbone.blocks[0], make_tokens(requires_grad=True)["rgb"]
    options = {"context_fn": lambda: create_selective_checkpoint_contexts(save_products)} if kept else {}
    with Products() as forward:
        out = run(bank, block, x, reentrant=False, **options)
    with Products() as after:
        got = backward(bank, out)
    with Products() as plain:
        expected = backward(bank, run(bank, block, make_tokens(requires_grad=True)["rgb"]))
    assert all(map(torch.equal, got, expected))
    gradient_products = plain.count - forward.count
    assert after.count == gradient_products if kept else after.count > gradient_products + forward.count // 2


def test_an_edit_in_place_of_a_kept_output_is_noticed(bank):
    block, x = bank.backbone.blocks[0], make_tokens(requires_grad=True)["rgb"]

    def function(x: Tensor) -> Tensor:
        y = block.mlp.fc1(x)  # kept
        y.mul_(2)
        return y.sin()

    contexts = lambda: create_selective_checkpoint_contexts(save_products)  # noqa: E731
    out = run(bank, function, x, reentrant=False, context_fn=contexts)
    with pytest.raises(RuntimeError, match="mutated"):
        out.sum().backward()


# ---- devices


def test_the_default_device_is_that_of_the_forward():
    made = []

    def function(x: Tensor) -> Tensor:
        made.append(torch.empty(2).device.type)
        return x * x

    x = torch.randn(2, device="meta", requires_grad=True)
    with torch.device("meta"):
        out = checkpoint(function, x, modules=())
        out.sum().backward()
    assert made == ["meta", "meta"]


@MODES
def test_tensors_without_data(bank, reentrant):
    """On the meta device nothing is computed, but shapes go through."""
    block = bank.backbone.blocks[0].to("meta")
    x = torch.randn(2, 5, 16, device="meta", requires_grad=True)
    with bank.active("rgb"):
        checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    assert x.grad.shape == x.shape
