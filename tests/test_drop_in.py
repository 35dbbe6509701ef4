"""`mmadapt.checkpoint` in place of `torch.utils.checkpoint.checkpoint`: its arguments, its company, its cost."""

import copy
import functools
import pickle
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import mmadapt.checkpointing
from mmadapt import AdapterBank, RecomputationError, checkpoint, register_state
from tests.programs import DIM, assert_same, make_bank, make_tokens, snapshot

MODES = pytest.mark.parametrize("reentrant", [False, True])
Wrap = Callable[..., Tensor]


def train(bank: AdapterBank, wrap: Wrap | None, context=None, seed: int = 3) -> tuple[Tensor, dict[str, Tensor]]:
    """Two modalities through all blocks, each block by `wrap(block, x)`, one backward under another route."""
    torch.manual_seed(seed)
    bank.backbone.zero_grad(set_to_none=True)
    total = torch.zeros(())
    for modality, x in make_tokens(requires_grad=True).items():
        with bank.active(modality), context() if context else nullcontext():
            for block in bank.backbone.blocks:
                x = block(x) if wrap is None else wrap(block, x)
            total = total + x.float().square().mean()
    with bank.active("rgb"):
        total.backward()
    return total.detach(), {n: p.grad.clone() for n, p in bank.backbone.named_parameters() if p.grad is not None}


def assert_equal(got: tuple, expected: tuple) -> None:
    assert torch.equal(got[0], expected[0])
    assert got[1].keys() == expected[1].keys()
    assert len(got[1]) == 32  # two trainable adapters, A and B, on two layers of four blocks
    for name, gradient in expected[1].items():
        assert torch.equal(got[1][name], gradient), name


def ours(reentrant: bool = False, **options) -> Wrap:
    return lambda block, x: checkpoint(block, x, use_reentrant=reentrant, **options)


# ---- torch's arguments


def keep_products(ctx, op, *args, **kwargs) -> CheckpointPolicy:
    kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = functools.partial(create_selective_checkpoint_contexts, keep_products)


@pytest.mark.parametrize(
    "options",
    [
        {"preserve_rng_state": True},
        {"determinism_check": "none"},
        {"debug": True},
        {"early_stop": False},
        {"context_fn": SELECTIVE},
        {"context_fn": lambda: (nullcontext(), nullcontext())},
        {"respect_saved_tensors_hooks": True, "context_fn": SELECTIVE},
        {"on_flags": "follow"},
    ],
    ids=lambda o: "+".join(o),
)  # fmt: skip
def test_every_option_gives_the_gradients_of_the_plain_run(options):
    bank = make_bank(dropout=0.1)
    assert_equal(train(bank, ours(**options)), train(bank, None))


def test_options_are_handed_to_torch(monkeypatch):
    """Each argument arrives as it was given; an unknown one goes to the function, as with torch."""
    seen = {}
    monkeypatch.setattr(
        mmadapt.checkpointing, "torch_checkpoint", lambda function, *args, **kwargs: seen.update(kwargs)
    )
    context = lambda: (nullcontext(), nullcontext())  # noqa: E731
    given = {"context_fn": context, "determinism_check": "none", "debug": False, "early_stop": False,
             "respect_saved_tensors_hooks": True, "preserve_rng_state": False}  # fmt: skip
    checkpoint(torch.sin, torch.ones(2), modules=(), scale=3, **given)
    assert seen == given | {"use_reentrant": False, "scale": 3}


@pytest.mark.parametrize("value", ["maybe", None, 3])
def test_a_wrong_choice_is_named(value):
    with pytest.raises(ValueError, match="on_flags: expected one of"):
        checkpoint(torch.sin, torch.ones(2), on_flags=value)
    with pytest.raises(ValueError, match="determinism_check"):
        checkpoint(torch.sin, torch.ones(2), determinism_check=value)


def test_a_context_function_sees_forward_and_recomputation():
    bank, log = make_bank(), []

    class Note:
        def __init__(self, word: str) -> None:
            self.word = word

        def __enter__(self) -> None:
            log.append(self.word)

        def __exit__(self, *_) -> None: ...

    wrap = ours(context_fn=lambda: (Note("forward"), Note("again")))
    assert_equal(train(bank, wrap), train(bank, None))
    assert Counter(log) == {"forward": 8, "again": 8}


# ---- in company


def nest_ours_in_ours(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(lambda x: checkpoint(block, x), x, modules=[block])


def nest_reentrant(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(lambda x: checkpoint(block, x, use_reentrant=True), x, modules=[block], use_reentrant=True)


def nest_three(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(lambda x: nest_ours_in_ours(block, x), x, modules=[block])


@pytest.mark.parametrize("wrap", [nest_ours_in_ours, nest_reentrant, nest_three])
def test_nesting(wrap):
    bank = make_bank(dropout=0.1)
    assert_equal(train(bank, wrap), train(bank, None))


def train_one(bank: AdapterBank, wrap: Wrap) -> dict[str, Tensor]:
    """As `train`, under one route from the first forward to the end of backward."""
    bank.backbone.zero_grad(set_to_none=True)
    with bank.active("rgb"):
        x = make_tokens(requires_grad=True)["rgb"]
        for block in bank.backbone.blocks:
            x = wrap(block, x)
        x.square().mean().backward()
    return {n: p.grad.clone() for n, p in bank.backbone.named_parameters() if p.grad is not None}


@MODES
def test_ours_in_torchs_is_right_or_named(reentrant):
    """torch recomputes two calls of ours to get at the input of the second, under the adapters that are active then."""

    def twice(block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, checkpoint(block, x))

    def wrap(block: nn.Module, x: Tensor) -> Tensor:
        return torch_checkpoint(lambda x: twice(block, x), x, use_reentrant=reentrant)

    bank = make_bank()
    expected, got = train_one(bank, lambda block, x: block(block(x))), train_one(bank, wrap)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[n], expected[n]) for n in got)
    with pytest.raises(RecomputationError, match="outer one too"):
        train(bank, wrap)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # said in an outer forward without grad
@MODES
@pytest.mark.parametrize("inner", [False, True])
def test_torchs_in_ours_is_right_or_named(reentrant, inner):
    bank = make_bank()

    def mlp(block: nn.Module, x: Tensor) -> Tensor:
        y = block(x)
        part = lambda y: block.mlp(block.norm2(y))  # noqa: E731  # no adapters there
        return y + torch_checkpoint(part, y, use_reentrant=inner)

    wrap = lambda block, x: checkpoint(lambda x: mlp(block, x), x, modules=[block], use_reentrant=reentrant)  # noqa: E731
    assert_equal(train(bank, wrap), train(bank, lambda block, x: (y := block(x)) + block.mlp(block.norm2(y))))
    whole = lambda x: torch_checkpoint(bank.backbone.blocks[0], x, use_reentrant=inner)  # noqa: E731
    x = make_tokens(requires_grad=True)["rgb"]
    with bank.active("rgb"), pytest.raises(ValueError, match=r"torch\.utils\.checkpoint inside"):
        checkpoint(whole, x, modules=[bank.backbone.blocks[1]], use_reentrant=reentrant)


@MODES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(reentrant, dtype):
    bank = make_bank()
    context = lambda: torch.autocast("cpu", dtype=dtype)  # noqa: E731
    assert_equal(train(bank, ours(reentrant), context), train(bank, None, context))


@pytest.mark.parametrize("stop", [False, True])
def test_early_stop_set_for_the_process(stop):
    bank = make_bank(dropout=0.1)
    with set_checkpoint_early_stop(stop):
        got = train(bank, ours())
    assert_equal(got, train(bank, None))


@MODES
def test_two_backwards_through_a_retained_graph(reentrant):
    bank = make_bank(dropout=0.1)
    block = bank.backbone.blocks[0]

    def run(wrap: Wrap) -> list[Tensor]:
        torch.manual_seed(0)
        with bank.active("rgb"):
            loss = wrap(block, make_tokens(requires_grad=True)["rgb"]).square().sum()
        got = []
        for retain in (True, False):
            loss.backward(retain_graph=retain)
            got += [p.grad.clone() for p in block.parameters() if p.grad is not None]
        bank.backbone.zero_grad(set_to_none=True)
        return got

    expected = run(lambda block, x: block(x))
    got = run(ours(reentrant))
    assert len(got) == len(expected) == 8
    assert all(map(torch.equal, got, expected))


def test_autograd_grad():
    bank = make_bank()
    block, x = bank.backbone.blocks[0], make_tokens(requires_grad=True)["rgb"]
    wanted = [x, *[p for p in block.parameters() if p.requires_grad]]

    def run(wrap: Wrap) -> tuple:
        with bank.active("rgb"):
            loss = wrap(block, x).square().sum()
        with bank.active("depth"):
            return torch.autograd.grad(loss, wanted, allow_unused=True)

    expected = run(lambda block, x: block(x))
    assert sum(g is not None for g in expected) == 5
    for got, gradient in zip(run(ours()), expected, strict=True):
        assert got is gradient is None or torch.equal(got, gradient)
    with pytest.raises(RuntimeError, match="use_reentrant=True"):  # as torch says it
        run(ours(True))


def test_second_order_gradients():
    bank = make_bank()
    block, x = bank.backbone.blocks[0], make_tokens(requires_grad=True)["rgb"]
    parameter = next(p for _, p in bank.parameters("rgb_ft"))

    def run(wrap: Wrap) -> Tensor:
        with bank.active("rgb"):
            loss = wrap(block, x).square().sum()
            (first,) = torch.autograd.grad(loss, x, create_graph=True)
        with bank.active("depth"):
            return torch.autograd.grad(first.square().sum(), parameter)[0]

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert torch.equal(run(ours()), run(lambda block, x: block(x)))


@MODES
def test_forwards_in_any_order_and_some_never_backward(reentrant):
    bank = make_bank()
    block = bank.backbone.blocks[0]

    def run(wrap: Wrap) -> list[Tensor]:
        losses = {}
        for modality, x in make_tokens(requires_grad=True).items():
            with bank.active(modality):
                losses[modality] = wrap(block, x).square().sum()
                wrap(block, x + 1)  # no backward
        got = []
        for modality in ("rgb", "depth"):
            losses[modality].backward()
            got += [p.grad.clone() for _, p in bank.parameters(f"{modality}_ft") if p.grad is not None]
        bank.backbone.zero_grad(set_to_none=True)
        return got

    before = snapshot(bank.backbone)
    got, expected = run(ours(reentrant)), run(lambda block, x: block(x))
    assert_same(snapshot(bank.backbone), before)
    assert len(got) == len(expected) == 8
    assert all(map(torch.equal, got, expected))


def test_a_forward_without_backward_is_freed():
    bank = make_bank()
    x = make_tokens(requires_grad=True)["rgb"] * 1
    with bank.active("rgb"):
        y = checkpoint(bank.backbone.blocks[0], x)
    alive = weakref.ref(x)
    del x, y
    assert alive() is None


def test_several_threads_run_backward():
    """Each has its own loss; recomputations in one thread must not see the adapters of another's."""
    bank = make_bank(modalities=("rgb", "depth", "audio"))
    blocks = bank.backbone.blocks
    tokens = make_tokens(("rgb", "depth", "audio"))

    def losses(wrap: Wrap) -> list[Tensor]:
        found = []
        for modality, x in tokens.items():
            with bank.active(modality):
                for block in blocks:
                    x = wrap(block, x)
                found.append(x.square().sum())
        return found

    for loss in losses(lambda block, x: block(x)):
        loss.backward()
    expected = {n: p.grad.clone() for n, p in bank.backbone.named_parameters() if p.grad is not None}
    for _ in range(5):
        bank.backbone.zero_grad(set_to_none=True)
        before = snapshot(bank.backbone)
        threads = [threading.Thread(target=loss.backward) for loss in losses(ours())]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        got = {n: p.grad.clone() for n, p in bank.backbone.named_parameters() if p.grad is not None}
        bank.backbone.zero_grad(set_to_none=True)
        assert_same(snapshot(bank.backbone), before)
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[n], expected[n]) for n in got)


# ---- copies


@pytest.mark.parametrize("how", [copy.deepcopy, lambda bank: pickle.loads(pickle.dumps(bank))])
def test_a_copy_trains_by_itself(how):
    bank = make_bank()
    expected = train(bank, ours())
    before = snapshot(bank.backbone)
    other = how(bank)
    with torch.no_grad():
        for name in other.names:
            for _, parameter in other.parameters(name):
                parameter.mul_(0.5)
    got = train(other, ours())
    assert_equal(got, train(other, None))
    assert not torch.equal(got[0], expected[0])
    bank.backbone.zero_grad(set_to_none=True)
    assert_same(snapshot(bank.backbone), before)
    assert_equal(train(bank, ours()), expected)


def test_a_copy_made_between_forward_and_backward():
    """An average of weights (EMA) is often copied there."""
    bank = make_bank()
    block = bank.backbone.blocks[0]
    with bank.active("rgb"):
        loss = checkpoint(block, make_tokens(requires_grad=True)["rgb"]).square().sum()
        block(make_tokens()["rgb"]).square().sum().backward()
    expected = [p.grad.clone() for p in block.parameters() if p.grad is not None]
    bank.backbone.zero_grad(set_to_none=True)
    other = copy.deepcopy(bank)
    with torch.no_grad():
        for parameter in other.backbone.parameters():
            parameter.zero_()
    loss.backward()
    assert all(map(torch.equal, [p.grad for p in block.parameters() if p.grad is not None], expected))
    assert all(p.grad is None for p in other.backbone.parameters())


# ---- without adapters


def test_without_adapters_it_is_torchs(monkeypatch):
    """The very function goes to torch, with nothing around it."""
    given = []

    def note(function, *args, **kwargs) -> Tensor:
        given.append(function)
        return torch_checkpoint(function, *args, **kwargs)

    monkeypatch.setattr(mmadapt.checkpointing, "torch_checkpoint", note)
    monkeypatch.setattr(mmadapt.checkpointing, "tuner_types", lambda: ())  # a process without PEFT
    block, x = nn.Linear(DIM, DIM), torch.ones(2, DIM, requires_grad=True)
    checkpoint(block, x).sum().backward()
    checkpoint(torch.sin, x, modules=()).sum().backward()
    assert given == [block, torch.sin]


@MODES
def test_without_adapters_registered_state_is_restored(monkeypatch, reentrant):
    """A library of adapters that is not PEFT, in a process without PEFT."""
    monkeypatch.setattr(mmadapt.checkpointing, "tuner_types", lambda: ())
    scale = [2.0]

    @contextmanager
    def under(value: float) -> Iterator[None]:
        scale[0], before = value, scale[0]
        try:
            yield
        finally:
            scale[0] = before

    def gradient() -> Tensor:
        x = torch.ones(2, requires_grad=True)
        with under(5.0):
            y = checkpoint(lambda x: (x * scale[0]).sin(), x, use_reentrant=reentrant)
        y.sum().backward()
        return x.grad

    expected = 5 * torch.full((2,), 5.0).cos()
    assert not torch.allclose(gradient(), expected)
    handle = register_state(lambda: functools.partial(under, scale[0]))
    assert torch.allclose(gradient(), expected)
    handle.remove()


def test_modules_to_save_follow_their_forward():
    """PEFT's wrapper of a trained copy of a module keeps its active adapter as tuner layers do."""
    from peft import LoraConfig, get_peft_model

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.final = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            return self.final(self.fc(x).sin()).sin()

    torch.manual_seed(0)
    model = get_peft_model(Net(), LoraConfig(r=2, target_modules=["fc"], modules_to_save=["final"]), "first")
    model.add_adapter("second", LoraConfig(r=2, target_modules=["fc"], modules_to_save=["final"]))
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    net, x = model.base_model.model, torch.randn(3, DIM)

    def run(wrap: Wrap) -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        total = torch.zeros(())
        for name in ("first", "second"):
            model.set_adapter(name)
            for parameter in (p for n, p in model.named_parameters() if ".first." in n or ".second." in n):
                parameter.requires_grad_(True)
            total = total + wrap(net, x).square().sum()
        total.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    expected = run(lambda net, x: net(x))
    got = run(ours())
    assert {n.split(".")[-2] for n in expected} == {"first", "second"}
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[n], expected[n]) for n in got)
    wrong = run(lambda net, x: torch_checkpoint(net, x, use_reentrant=False))
    assert not all(torch.equal(wrong[n], expected[n]) for n in wrong)


def test_an_error_in_backward_of_a_nested_checkpoint_is_raised_once():
    bank = make_bank()
    block = bank.backbone.blocks[0]
    with bank.active("rgb"):
        loss = nest_ours_in_ours(block, make_tokens(requires_grad=True)["rgb"]).square().sum()
    block.norm1 = nn.LayerNorm(DIM)
    with pytest.raises(RecomputationError, match="replaced or removed"):
        loss.backward()
