"""What a recomputation sees and leaves behind, beside the adapters: buffers, hooks, contexts, kernels, inputs, draws.

The reference is the un-checkpointed run of the same program; the control is torch's own checkpoint, which is wrong or
silent in each case.
"""

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from contextvars import ContextVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from mmadapt import AdapterBank, AdapterState, RecomputationError, checkpoint, register_state
from tests.programs import DIM, assert_same, make_bank, snapshot

MODES = pytest.mark.parametrize("reentrant", [False, True])
Call = Callable[..., Tensor]


@pytest.fixture
def bank() -> AdapterBank:
    return make_bank()


def inputs(n: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(4, 6, DIM, generator=generator).requires_grad_() for _ in range(n)]


def calls(reentrant: bool) -> dict[str, Call]:
    return {
        "plain": lambda function, *args: function(*args),
        "torch": lambda function, *args: torch_checkpoint(function, *args, use_reentrant=reentrant),
        "ours": lambda function, *args: checkpoint(function, *args, use_reentrant=reentrant),
    }


def gradients(root: nn.Module, *more: Tensor) -> list[Tensor | None]:
    got = [None if p.grad is None else p.grad.clone() for p in (*root.parameters(), *more)]
    for p in (*root.parameters(), *more):
        p.grad = None
    return got


def close(these: list[Tensor | None], those: list[Tensor | None]) -> bool:
    """Equal but for the order of sums: reentrant mode adds the gradients of several calls in another order."""
    pairs = [(a, b) for a, b in zip(these, those, strict=True) if a is not None or b is not None]
    return all(a is not None and b is not None and (a - b).norm() <= 1e-6 * b.norm() for a, b in pairs)


def same(these: list[Tensor | None], those: list[Tensor | None]) -> bool:
    return all(
        a is None if b is None else a is not None and torch.equal(a, b) for a, b in zip(these, those, strict=True)
    )


class Block(nn.Module):
    """A block with adapters and something beside it."""

    def __init__(self, block: nn.Module, extra: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.block = block
        if isinstance(extra, nn.Module):
            self.inner = extra
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        return self.extra(self.block(x))


# ---- buffers


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Replaced(nn.Module):
    """Puts a new tensor in place of its buffer, and reads the old one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.scale
        self.scale = self.scale + 0.5
        return y


class FirstSeen(nn.Module):
    """Registers a buffer in its first forward and counts in it."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "count"):
            self.register_buffer("count", torch.zeros(()))
        self.count += 1
        return x * self.count.clone()


class Cache(nn.Module):
    """A table that is made anew when an input is longer than it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(2.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > len(self.table):
            self.table = torch.arange(float(x.shape[1])) + len(self.table)
        return x * self.table[: x.shape[1], None]


class Shared(nn.Module):
    """Two buffers in the same memory: one is written, the other is read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("whole", torch.ones(2 * DIM))
        self.register_buffer("part", self.whole.data[DIM:])

    def forward(self, x: Tensor) -> Tensor:
        self.whole.mul_(1.5)
        return x * self.part.clone()


BUFFERED = {
    "running statistics": Norm,
    "registered in a forward": FirstSeen,
    "memory of another": Shared,
    "power iteration": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(DIM, DIM)),
    "replaced": Replaced,
}


@MODES
@pytest.mark.parametrize("kind", BUFFERED)
def test_buffers_are_updated_once_per_forward(kind, reentrant):
    def run(call: Call) -> tuple[list, list]:
        torch.manual_seed(0)
        bank = make_bank()
        block = Block(bank.backbone.blocks[0], BUFFERED[kind]())
        for _ in range(2):  # the second step knows which buffers a forward writes
            with bank.active("rgb"):
                sum(call(block, x).square().sum() for x in inputs()).backward()
        return gradients(block), [b.clone() for b in block.buffers()]

    results = {name: run(call) for name, call in calls(reentrant).items()}
    assert (close if reentrant else same)(results["ours"][0], results["plain"][0])
    assert same(results["ours"][1], results["plain"][1])
    if kind != "replaced" or reentrant:  # non-reentrant mode stops early, before that write
        assert not same(results["torch"][1], results["plain"][1])


@MODES
def test_a_cache_that_grows_from_forward_to_forward(reentrant):
    """Each recomputation finds the cache that its forward found, not the longer one of a later forward."""

    def run(call: Call) -> list:
        torch.manual_seed(0)
        bank = make_bank()
        block = Block(bank.backbone.blocks[0], Cache())
        xs = [torch.randn(2, n, DIM, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in (2, 4, 7)]
        with bank.active("rgb"):
            sum(call(block, x).square().sum() for x in xs).backward()
        return [*gradients(block, *xs), block.inner.table]

    results = {name: run(call) for name, call in calls(reentrant).items()}
    assert (close if reentrant else same)(results["ours"], results["plain"])
    assert not close(results["torch"], results["plain"])


NORMS: list[nn.Module] = []  # reached as a global


class Hidden(nn.Module):
    def __init__(self, block: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.norms = [norm]

    def forward(self, x: Tensor) -> Tensor:
        return self.norms[0](self.block(x))


class Holder:
    def __init__(self, norm: nn.Module) -> None:
        self.norm = norm

    def run(self, x: Tensor, block: nn.Module) -> Tensor:
        return self.norm(block(x))


@MODES
@pytest.mark.parametrize("form", ["global", "list of a module", "method of an object"])
def test_modules_that_were_not_found_are_restored_too(form, reentrant):
    """Their buffers are updated once, and their mode is that of the forward, at each step."""

    def run(call: Call) -> list:
        torch.manual_seed(0)
        bank = make_bank()
        block, norm = bank.backbone.blocks[0], nn.Sequential(Norm(), nn.Dropout(0.5))
        NORMS[:] = [norm]
        hidden, holder = Hidden(block, norm), Holder(norm)
        function, args = {
            "global": (lambda x, block: NORMS[0](block(x)), (block,)),
            "list of a module": (hidden, ()),
            "method of an object": (holder.run, (block,)),
        }[form]
        got = []
        for _ in range(2):
            norm.train()
            with bank.active("rgb"):
                loss = call(function, *inputs(1), *args).square().sum()
            norm.eval()
            loss.backward()
            got += [*gradients(nn.ModuleList([block, norm])), *(b.clone() for b in norm.buffers())]
            assert not any(m.training for m in norm.modules())
        return got

    expected = run(calls(reentrant)["plain"])
    assert same(run(calls(reentrant)["ours"]), expected)
    try:
        assert not same(run(calls(reentrant)["torch"]), expected)
    except CheckpointError:
        assert not reentrant
    assert not torch.nn.modules.module._global_forward_pre_hooks


@MODES
def test_buffers_without_any_adapter(reentrant):
    def run(call: Call) -> list:
        torch.manual_seed(0)
        block = Norm()
        call(block, *inputs(1)).square().sum().backward()
        return [b.clone() for b in block.buffers()]

    results = {name: run(call) for name, call in calls(reentrant).items()}
    assert same(results["ours"], results["plain"])
    assert not same(results["torch"], results["plain"])


def test_a_second_backward_finds_the_same_buffers(bank):
    torch.manual_seed(0)
    block = Block(bank.backbone.blocks[0], nn.utils.parametrizations.spectral_norm(nn.Linear(DIM, DIM)))
    with bank.active("rgb"):
        loss = checkpoint(block, *inputs(1)).square().sum()
    before = [b.clone() for b in block.buffers()]
    loss.backward(retain_graph=True)
    once = gradients(block)
    loss.backward()
    assert same(gradients(block), once)
    assert same(list(block.buffers()), before)


@MODES
def test_a_buffer_edited_by_somebody_else_is_named(bank, reentrant):
    block = Block(bank.backbone.blocks[0], Table())
    with bank.active("rgb"):
        loss = checkpoint(block, *inputs(1), use_reentrant=reentrant).sum()
    block.inner.table.mul_(2)
    with pytest.raises(RecomputationError, match="table"):
        loss.backward()


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.rand(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table


def test_a_buffer_written_now_and_then_is_named_at_the_first_time(bank):
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(()))
            self.write = False

        def forward(self, x: Tensor) -> Tensor:
            y = x * self.scale
            if self.write:
                self.scale.mul_(2)
            return y

    extra = Sometimes()
    block = Block(bank.backbone.blocks[0], extra)
    with bank.active("rgb"):
        checkpoint(block, *inputs(1)).sum().backward()
        extra.write = True
        loss = checkpoint(block, *inputs(1)).sum()
        with pytest.raises(RecomputationError, match="scale"):
            loss.backward()
        before = extra.scale.clone()
        checkpoint(block, *inputs(1)).sum().backward()
    assert torch.equal(extra.scale, before * 2)


# ---- contexts

SCALE: ContextVar[float] = ContextVar("scale", default=1.0)
SEEN: ContextVar[int] = ContextVar("seen", default=0)


def scaled(x: Tensor) -> Tensor:
    SEEN.set(SEEN.get() + 1)
    return (x * SCALE.get()).sin() + SEEN.get()


@MODES
def test_context_variables_are_those_of_the_forward(reentrant):
    def run(call: Call) -> tuple[list, int]:
        bank = make_bank()
        block = Block(bank.backbone.blocks[0], scaled)
        total = torch.zeros(())
        with bank.active("rgb"):
            for value, x in zip((2.0, 3.0), inputs(), strict=True):
                token = SCALE.set(value)
                total = total + call(block, x).square().sum()
                SCALE.reset(token)
            seen = SEEN.get()
            total.backward()
        leaked = SEEN.get() - seen
        SEEN.set(0)
        return gradients(block), leaked

    results = {name: run(call) for name, call in calls(reentrant).items()}
    assert same(results["ours"][0], results["plain"][0])
    assert not same(results["torch"][0], results["plain"][0])
    assert results["ours"][1] == 0  # what a recomputation writes stays in its own context
    assert results["torch"][1] == 2


class ForwardContext:
    """A minimal look-alike of AdapterHub's: what the layers read lies in a thread-local, for the time of a forward."""

    storage = threading.local()

    @classmethod
    def current(cls) -> float:
        return getattr(cls.storage, "value", 1.0)

    @classmethod
    @contextmanager
    def use(cls, value: float):
        before, cls.storage.value = cls.current(), value
        try:
            yield
        finally:
            cls.storage.value = before


@MODES
def test_registered_state_is_restored(reentrant):
    def capture():
        then = ForwardContext.current()
        return lambda: ForwardContext.use(then)

    def run(call: Call) -> list:
        bank = make_bank()
        block = Block(bank.backbone.blocks[0], lambda x: (x * ForwardContext.current()).sin())
        total = torch.zeros(())
        with bank.active("rgb"):
            for value, x in zip((2.0, 3.0), inputs(), strict=True):
                with ForwardContext.use(value):
                    total = total + call(block, x).square().sum()
            total.backward()
        assert ForwardContext.current() == 1.0
        return gradients(block)

    options = calls(reentrant)
    expected = run(options["plain"])
    assert not same(run(options["ours"]), expected)  # nobody has said where it lies
    handle = register_state(capture)
    try:
        assert same(run(options["ours"]), expected)
        assert not same(run(options["torch"]), expected)
    finally:
        handle.remove()
    handle.remove()
    assert not same(run(options["ours"]), expected)
    with pytest.raises(TypeError, match="expected a function"):
        register_state(3)


@MODES
def test_attention_kernels_and_default_dtype_are_those_of_the_forward(bank, reentrant):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    seen = []

    def note(x: Tensor) -> Tensor:
        seen.append((torch._C._get_flash_sdp_enabled(), torch.get_default_dtype()))
        return x

    block, x = Block(bank.backbone.blocks[0], lambda x: note(x).sin()), inputs(1)[0]
    with bank.active("rgb"), sdpa_kernel(SDPBackend.MATH):
        torch.set_default_dtype(torch.float64)
        try:
            loss = checkpoint(block, x, use_reentrant=reentrant).sum()
        finally:
            torch.set_default_dtype(torch.float32)
    loss.backward()
    assert seen == [(False, torch.float64)] * 2
    assert torch._C._get_flash_sdp_enabled()
    assert torch.get_default_dtype() == torch.float32


# ---- hooks


@MODES
def test_hooks_are_those_of_the_forward(reentrant):
    def run(call: Call) -> tuple[list, Counter]:
        bank = make_bank()
        block, count = bank.backbone.blocks[0], Counter()

        def double(module: nn.Module, args: tuple, kwargs: dict) -> tuple:
            return (args[0] * 2,), kwargs

        def later(*_) -> None:
            count["later"] += 1

        handle = block.attn.qkv.lora_A["rgb"].register_forward_pre_hook(double, with_kwargs=True)
        with bank.active("rgb"):
            y = call(block, *inputs(1))
        handle.remove()
        block.norm1.register_forward_hook(later)
        before = snapshot(bank.backbone)
        with bank.active("rgb"):
            y.square().sum().backward()
        got = gradients(block)
        assert_same(snapshot(bank.backbone), before)
        return got, count

    results = {name: run(call) for name, call in calls(reentrant).items()}
    assert same(results["ours"][0], results["plain"][0])
    assert not results["ours"][1]
    assert not same(results["torch"][0], results["plain"][0])


@MODES
def test_per_sample_adapter_names_of_peft(reentrant):
    """PEFT hands them on as hooks that are gone when backward recomputes."""

    def run(call: Call) -> list:
        bank = make_bank()
        bank.model.eval()  # PEFT refuses the argument in training mode
        blocks = bank.backbone.blocks
        bank.backbone.forward = lambda x: call(blocks[1], call(blocks[0], x))
        names = ["rgb_ft", "depth_ft", "rgb_ft", "__base__"]
        with bank.active("depth"):  # the names stand above the route, for PEFT
            bank.model(*inputs(1), adapter_names=names).square().sum().backward()
        return gradients(blocks)

    options = calls(reentrant)
    expected = run(options["plain"])
    assert sum(g is not None for g in expected) >= 8
    assert same(run(options["ours"]), expected)
    with pytest.raises((CheckpointError, AssertionError)):
        assert same(run(options["torch"]), expected)


@MODES
def test_full_backward_hooks(reentrant):
    def run(call: Call) -> tuple[list, list]:
        bank = make_bank()
        block, seen = bank.backbone.blocks[0], []
        hook = lambda module, grad_input, grad_output: seen.append(grad_output[0].clone())  # noqa: E731
        block.attn.qkv.register_full_backward_hook(hook)
        with bank.active("rgb"):
            y = call(block, *inputs(1))
        with bank.active("depth"):
            y.square().sum().backward()
        return gradients(block), seen

    plain, ours = (run(calls(reentrant)[name]) for name in ("plain", "ours"))
    assert same(ours[0], plain[0])
    assert same(ours[1], plain[1])


# ---- inputs, parameters, draws


@MODES
@pytest.mark.parametrize("where", ["in the block", "after it", "nested"])
def test_inputs_edited_in_place_are_named(bank, where, reentrant):
    """torch says so of tensors that are arguments themselves, and not of those in containers."""
    block = bank.backbone.blocks[0]

    def edit(x: Tensor, *rest) -> Tensor:
        y = block(x * 1)  # which does not need x in backward: without checkpointing the edit is allowed
        if where == "in the block":
            x.add_(1)
        return y

    def run(call: Call) -> list:
        x, rest = inputs(1)[0] * 1, [{"scale": torch.ones(2)}]
        with bank.active("rgb"):
            loss = call(edit, x, *rest).square().sum()
            if where == "after it":
                x.detach().add_(1)
            if where == "nested":
                rest[0]["scale"].add_(1)
            loss.backward()
        return gradients(block)

    run(lambda function, *args: function(*args))  # no error
    with pytest.raises(RuntimeError, match=r"edited in place|by an inplace operation|used in an in-place operation"):
        run(lambda function, *args: checkpoint(function, *args, modules=[block], use_reentrant=reentrant))


@MODES
@pytest.mark.parametrize("event", ["data", "dtype"])
def test_parameters_given_other_data_are_named(bank, event, reentrant):
    block = bank.backbone.blocks[0]
    with bank.active("rgb"):
        loss = checkpoint(block, *inputs(1), use_reentrant=reentrant, label="block 0").square().sum()
    if event == "data":
        weight = block.attn.qkv.lora_A["rgb_ft"].weight
        weight.data = torch.randn_like(weight)
    else:
        block.double()
    with pytest.raises(RecomputationError, match=r"block 0: .*were given other data"):
        loss.backward()


@MODES
def test_drawing_without_preserving_the_random_state_is_refused(reentrant):
    bank = make_bank(dropout=0.5)
    block = bank.backbone.blocks[0]
    with bank.active("rgb"), pytest.raises(ValueError, match="preserve_rng_state=True"):
        checkpoint(block, *inputs(1), use_reentrant=reentrant, preserve_rng_state=False)
    block.eval()
    with bank.active("rgb"):
        checkpoint(block, *inputs(1), use_reentrant=reentrant, preserve_rng_state=False).sum().backward()


@MODES
def test_random_streams_go_on_as_if_nothing_was_recomputed(reentrant):
    def run(call: Call) -> Tensor:
        bank = make_bank(dropout=0.5)
        torch.manual_seed(7)
        with bank.active("rgb"):
            y = call(bank.backbone.blocks[0], *inputs(1))
        torch.rand(3)
        y.sum().backward()
        return torch.rand(3)

    options = calls(reentrant)
    assert torch.equal(run(options["ours"]), run(options["plain"]))


# ---- errors


def test_torchs_own_complaint_names_the_block_and_the_states(bank):
    block, calls = bank.backbone.blocks[0], itertools.count()

    def fickle(x: Tensor) -> Tensor:
        y = block(x)
        return y.sin() if next(calls) == 0 else y[:2].sin()

    with bank.active("rgb"):
        loss = checkpoint(fickle, *inputs(1), label="block 7").sum()
    with pytest.raises(RecomputationError, match="cannot recompute block 7") as error:
        loss.backward()
    assert isinstance(error.value, CheckpointError)
    assert "At forward: route ['rgb', 'rgb_ft'], train mode; found now: route []" in str(error.value)
    assert isinstance(error.value.__cause__, CheckpointError)


@MODES
def test_a_forward_that_raises_leaves_nothing(bank, reentrant):
    def fail(x: Tensor) -> Tensor:
        bank.backbone.blocks[0](x)
        raise KeyError("boom")

    before = snapshot(bank.backbone)
    with bank.active("rgb"), pytest.raises(KeyError):
        checkpoint(fail, *inputs(1), modules=[bank.backbone.blocks[0]], use_reentrant=reentrant)
    assert_same(snapshot(bank.backbone), before)
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_the_layers_of_a_standalone_state(bank):
    """`AdapterState` alone, as a user of torch's own hooks would use it."""
    block = bank.backbone.blocks[0]
    with bank.active("rgb"):
        state = AdapterState.capture(block)
        expected = block(*inputs(1))
    with bank.active("depth"):
        assert not torch.equal(block(*inputs(1)), expected)
        with state.applied():
            assert torch.equal(block(*inputs(1)), expected)
        assert AdapterState.capture(block).route == ("depth", "depth_ft")
    assert state.route == ("rgb", "rgb_ft")


# ---- what a second run of a function would do otherwise


@MODES
def test_loop_variables_in_closures_are_those_of_the_forward(reentrant):
    def run(call: Call) -> list:
        bank = make_bank()
        blocks, x = bank.backbone.blocks, inputs(1)[0]
        with bank.active("rgb"):
            for i, block in enumerate(blocks):
                scale = float(i + 1)
                x = call(lambda t: (block(t) + blocks[i](t)).sin() * scale, x)  # noqa: B023
            x.square().sum().backward()
        assert block is blocks[-1]
        return gradients(blocks)

    results = {name: run(call) for name, call in calls(reentrant).items() if name != "torch"}
    assert (close if reentrant else same)(results["ours"], results["plain"])


@MODES
@pytest.mark.parametrize("where", ["closure", "arguments"])
def test_containers_that_the_caller_fills_anew(where, reentrant):
    """One dict for all modalities: each recomputation finds in it what its forward found; a list is filled once."""

    def run(call: Call) -> tuple[list, int]:
        torch.manual_seed(0)
        bank = make_bank()
        block, batch, seen = bank.backbone.blocks[0], {}, []

        def closure(x: Tensor) -> Tensor:
            seen.append(1)
            return block(x * batch["scale"]["value"])

        def function(x: Tensor, given: dict, log: list) -> Tensor:
            log.append(1)
            return block(x * given["scale"]["value"])

        total = torch.zeros(())
        for scale, x in enumerate(inputs(2), start=1):
            batch["scale"] = {"value": scale}
            with bank.active("rgb"):
                out = call(closure, x) if where == "closure" else call(function, x, batch, seen)
            total = total + out.square().sum()
            batch["scale"]["value"] = 100
            batch.clear()
        total.backward()
        return gradients(block), len(seen)

    expected, got = run(calls(reentrant)["plain"]), run(calls(reentrant)["ours"])
    assert (close if reentrant else same)(got[0], expected[0])
    assert got[1] == expected[1] == 2
    with pytest.raises(KeyError, match="scale"):  # the control: the dict is empty by then
        run(calls(reentrant)["torch"])


def test_containers_in_circles_and_long_ones(bank):
    circle: list = [1.0]
    circle.append(circle)
    long = list(range(100_000))
    block = bank.backbone.blocks[0]
    with bank.active("rgb"):
        loss = checkpoint(lambda x: block(x * circle[0]) * (len(long) > 3), *inputs(1)).sum()
    loss.backward()
    assert len([g for g in gradients(block) if g is not None]) == 4


@MODES
def test_a_tensor_of_a_closure_edited_in_between_is_named(bank, reentrant):
    block, scale = bank.backbone.blocks[0], torch.ones(DIM)
    with bank.active("rgb"):
        loss = checkpoint(lambda x: block(x) * scale, *inputs(1), use_reentrant=reentrant).sum()
    scale.mul_(2)
    with pytest.raises(RecomputationError, match="tensors of its closure"):
        loss.backward()


@MODES
def test_names_of_a_closure_that_are_unbound_before_or_after(bank, reentrant):
    block, x = bank.backbone.blocks[0], inputs(1)[0]
    scale = 2.0

    def run(t: Tensor) -> Tensor:
        return (block(t) * scale).sin() if t.dim() == 3 else late(t)  # noqa: F821  # deleted below

    with bank.active("rgb"):
        loss = checkpoint(run, x, use_reentrant=reentrant).sum()
    late = torch.sin
    del scale
    loss.backward()
    assert x.grad is not None
    assert run.__closure__ is not None
    with pytest.raises(NameError):
        run(x)


@MODES
def test_what_the_function_writes_does_not_stay(bank, reentrant):
    blocks = bank.backbone.blocks

    def switch(x: Tensor) -> Tensor:
        bank.model.base_model.set_adapter(["rgb"])
        blocks.eval()
        handle = blocks[0].register_forward_hook(lambda *_: None)
        y = blocks[1](blocks[0](x)).sin()
        handle.remove()
        return y

    with bank.active("rgb"):
        loss = checkpoint(switch, *inputs(1), modules=[blocks], use_reentrant=reentrant, on_flags="follow").sum()
    blocks.train()
    for name in bank.trainable:
        for _, parameter in bank.parameters(name):
            parameter.requires_grad_(True)
    with bank.active("depth"):
        before = snapshot(bank.backbone)
        loss.backward()
        bank.backbone.zero_grad(set_to_none=True)
        assert_same(snapshot(bank.backbone), before)


def test_a_gradient_taken_in_the_function():
    """Forces from energies: part of the function is recomputed while it still runs."""

    def run(call: Call) -> list:
        bank = make_bank()
        block = Block(bank.backbone.blocks[0], Norm())

        def energy(x: Tensor) -> Tensor:
            (force,) = torch.autograd.grad(block(x).square().sum(), x, create_graph=True)
            return force.square().sum()

        with bank.active("rgb"), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            loss = call(energy, *inputs(1))
        with bank.active("depth"), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            loss.backward()
        return [*gradients(block), *block.buffers()]

    options = calls(False)
    assert same(run(options["ours"]), run(options["plain"]))


@MODES
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_a_fused_step_in_between_is_named(bank, optimizer, reentrant):
    block = bank.backbone.blocks[0]
    fused = optimizer([p for _, p in bank.parameters("rgb_ft")], lr=0.1, fused=True)
    with bank.active("rgb"):
        loss = checkpoint(block, *inputs(1), use_reentrant=reentrant).sum()
        block(*inputs(1)).sum().backward()
    fused.step()
    with pytest.raises(RecomputationError, match="edited in place"):
        loss.backward()


@MODES
def test_buffers_written_behind_torchs_back(reentrant):
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count.data.add_(1)
            return (x * self.count.clone()).sin()

    def run(call: Call) -> tuple[list, Tensor]:
        bank = make_bank()
        block = Block(bank.backbone.blocks[0], Hidden())
        with bank.active("rgb"):
            call(block, *inputs(1)).sum().backward()
        return gradients(block), block.inner.count

    plain, ours = (run(calls(reentrant)[name]) for name in ("plain", "ours"))
    assert same(ours[0], plain[0])
    assert torch.equal(ours[1], plain[1])


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning", "ignore:`torch.jit:DeprecationWarning")
@MODES
def test_compiled_and_scripted_blocks(bank, reentrant):
    x = inputs(1)[0]
    block = bank.backbone.blocks[0]
    compiled = torch.compile(block, backend="eager")
    with bank.active("rgb"):
        block(x).square().sum().backward()
        expected = gradients(block, x)
        loss = checkpoint(compiled, x, use_reentrant=reentrant).square().sum()
    with bank.active("depth"):
        loss.backward()
    assert close(gradients(block, x), expected)
    if not reentrant:  # torch's own checkpoint fails there on scripted modules
        return
    scripted = torch.jit.script(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()))
    checkpoint(scripted, x, use_reentrant=reentrant).sum().backward()
    assert x.grad is not None
