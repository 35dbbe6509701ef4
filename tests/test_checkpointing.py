"""`checkpoint`, `CheckpointPlan` and `run_blocks`: what they count, find, refuse and leave behind."""

import functools
from collections import Counter

import pytest
import torch
from peft import LoraConfig
from torch import nn

from mmadapt import AdapterBank, CheckpointPlan, RecomputationError, ViViT, checkpoint, run_blocks
from tests.programs import (
    DEPTH,
    DIM,
    PLAIN,
    assert_same,
    make_bank,
    make_tokens,
    snapshot,
    step,
    trainable_names,
)


@pytest.fixture
def bank() -> AdapterBank:
    return make_bank()


def equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return got.keys() == expected.keys() and all(torch.equal(got[n], expected[n]) for n in expected)


# ---- the effect, counted


@pytest.mark.parametrize(
    ("plan", "recomputed"),
    [
        (PLAIN, set()),
        (CheckpointPlan(), {0, 1, 2, 3}),
        (CheckpointPlan(use_reentrant=True), {0, 1, 2, 3}),
        (CheckpointPlan(segment_size=3), {0, 1, 2, 3}),
        (CheckpointPlan(segment_size=3, last_plain=True), {0, 1, 2}),
        (CheckpointPlan(every=2), {0, 2}),
        (CheckpointPlan(every=2, use_reentrant=True), {0, 2}),
        (CheckpointPlan(every=4), {0}),
        (CheckpointPlan(segments=2, last_plain=True), {0, 1}),
        (CheckpointPlan(last_plain=True), {0, 1, 2}),
    ],
    ids=str,
)
def test_backward_runs_the_blocks_that_the_plan_says(bank, plan, recomputed):
    calls: Counter[int] = Counter()
    for i, block in enumerate(bank.backbone.blocks):
        block.register_forward_pre_hook(lambda *_, i=i: calls.update([i]))
    step(bank, make_tokens(), plan)
    assert calls == {i: 2 * (2 if i in recomputed else 1) for i in range(DEPTH)}  # two modalities


def held_bytes(bank: AdapterBank, tokens: dict[str, torch.Tensor], plan: CheckpointPlan) -> int:
    """Bytes that autograd keeps between forward and backward, parameters not counted, each storage once."""
    parameters = {p.untyped_storage().data_ptr() for p in bank.backbone.parameters()}
    storages: dict[int, int] = {}
    kept = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)  # so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for modality, x in tokens.items():
            with bank.active(modality):
                kept.append(run_blocks(bank.backbone.blocks, x, plan=plan))
    return sum(storages.values())


@pytest.mark.parametrize("reentrant", [False, True])
def test_held_bytes_fall_more_than_fivefold_at_depth_12(reentrant):
    bank, tokens = make_bank(depth=12), make_tokens()
    plain = held_bytes(bank, tokens, PLAIN)
    per_block = held_bytes(bank, tokens, CheckpointPlan(use_reentrant=reentrant))
    segments = held_bytes(bank, tokens, CheckpointPlan(segment_size=4, use_reentrant=reentrant))
    assert plain > 5 * per_block > 5 * segments


# ---- where the tuner layers are looked for


def forms(block: nn.Module) -> dict[str, tuple]:
    """The same call written in every way in which checkpoint looks for modules: function, args, kwargs."""

    class Plain:  # no Module itself
        def __init__(self) -> None:
            self.block = block

        def run(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(x)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = block

        def run(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    def closure(x):
        return block(x)

    def nested(x):
        return closure(x)

    return {
        "module": (block, (), {}),
        "argument": (lambda x, module: module(x), (block,), {}),
        "nested argument": (lambda x, holder: holder["blocks"][0](x), ({"blocks": [block]},), {}),
        "keyword": (lambda x, module=None: module(x), (), {"module": block}),
        "partial": (functools.partial(lambda module, x: module(x), block), (), {}),
        "partial of method": (functools.partial(Outer().run), (), {}),
        "closure": (closure, (), {}),
        "closure of closure": (nested, (), {}),
        "method": (Outer().run, (), {}),
        "modules=": (Plain().run, (), {"modules": [block]}),
        "modules= one": (Plain().run, (), {"modules": block}),
    }


@pytest.mark.parametrize("form", list(forms(nn.Identity())))
@pytest.mark.parametrize("reentrant", [False, True])
def test_tuner_layers_are_found_through(form, reentrant, bank):
    def run(blocks, x, plan):
        for block in blocks:
            function, args, kwargs = forms(block)[form]
            if plan.enabled:
                x = checkpoint(function, x, *args, use_reentrant=reentrant, **kwargs)
            else:
                kwargs.pop("modules", None)
                x = function(x, *args, **kwargs)
        return x

    expected = step(bank, make_tokens(), PLAIN, run)
    with bank.active("depth"):
        assert equal(step(bank, make_tokens(), CheckpointPlan(), run).gradients, expected.gradients)


BLOCKS: list[nn.Module] = []  # reached as a global


class Unregistered(nn.Module):
    """A Module that keeps its block where no search looks, beside one that it keeps as usual or beside nothing."""

    def __init__(self, block: nn.Module, other: nn.Module | None = None) -> None:
        super().__init__()
        self.hidden = [block]
        self.other = other or nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.hidden[0](x))

    run = forward


def strays(block: nn.Module, other: nn.Module) -> dict[str, tuple]:
    """Calls that reach `block` where the search does not see it, though in part it finds `other`."""

    class Holder:
        def __init__(self) -> None:
            self.block = block

    holder = Holder()
    return {
        "object in a closure": (lambda x: holder.block(x), ()),
        "global": (lambda x: BLOCKS[0](x), ()),
        "global beside a closure": (lambda x: other(BLOCKS[0](x)), ()),
        "global beside an argument": (lambda x, module: module(BLOCKS[0](x)), (other,)),
        "list of a module": (Unregistered(block), ()),
        "list of a module beside a child": (Unregistered(block, other), ()),
        "method of such a module": (Unregistered(block, other).run, ()),
    }


@pytest.mark.parametrize("form", list(strays(nn.Identity(), nn.Identity())))
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_tuner_layer_that_was_not_found_is_an_error_when_it_runs(form, reentrant, bank):
    """Without the error its recomputation would run under another route: wrong gradients, the same loss."""
    block, other = bank.backbone.blocks[:2]
    BLOCKS[:] = [block]
    function, args = strays(block, other)[form]
    x = torch.randn(1, 2, DIM, requires_grad=True)
    with bank.active("rgb"):
        for _ in range(2):  # an error is not forgotten
            with pytest.raises(ValueError, match=r"pass modules="):
                checkpoint(function, x, *args, use_reentrant=reentrant)
        function(x, *args).square().sum().backward()
        expected, x.grad = x.grad, None
        loss = checkpoint(function, x, *args, modules=[block, other], use_reentrant=reentrant).square().sum()
    with bank.active("depth"):
        loss.backward()
    assert torch.equal(x.grad, expected)
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_a_module_that_reaches_another_layer_under_one_route_only(bank):
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = bank.backbone.blocks[0]

        def forward(self, x):
            return (BLOCKS[0] if path[0] == "depth" else self.block)(x)

    BLOCKS[:] = [bank.backbone.blocks[1]]
    path = ["rgb"]
    fork, x = Fork(), torch.randn(1, 2, DIM)
    with bank.active("rgb"):
        checkpoint(fork, x)
    path[0] = "depth"
    with bank.active("depth"), pytest.raises(ValueError, match="pass modules="):
        checkpoint(fork, x)


def test_nothing_found_and_nothing_run_is_no_error(bank):
    x = torch.randn(1, 2, DIM, requires_grad=True)
    for modules in (None, ()):
        x.grad = None
        checkpoint(torch.sin, x, modules=modules).sum().backward()
        assert torch.equal(x.grad, x.detach().cos())


# ---- reentrant mode where torch's gives no gradient


def test_reentrant_takes_keywords_containers_and_inputs_without_grad():
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)

    def function(x, pair, *, scale):
        return {"y": layer(x) * scale["s"], "rest": (pair[0] + pair[1], "text")}

    def run(call):
        layer.zero_grad()
        x = torch.ones(2, 4)
        pair = [torch.ones(4, requires_grad=True), torch.ones(4)]
        scale = {"s": torch.full((4,), 2.0, requires_grad=True)}
        out = call(x, pair, scale=scale)
        assert out["rest"][1] == "text"
        (out["y"].sum() + out["rest"][0].square().sum()).backward()
        return [layer.weight.grad, layer.bias.grad, pair[0].grad, scale["s"].grad]

    expected = [g.clone() for g in run(function)]
    got = run(lambda *args, **kwargs: checkpoint(function, *args, modules=[layer], use_reentrant=True, **kwargs))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_reentrant_without_anything_to_train_builds_no_graph():
    layer = nn.Linear(4, 4).requires_grad_(False)
    assert not checkpoint(layer, torch.ones(2, 4), use_reentrant=True).requires_grad


@pytest.mark.parametrize(
    "options",
    [
        {"debug": True},
        {"context_fn": lambda: (torch.autocast("cpu"), torch.autocast("cpu"))},
        {"respect_saved_tensors_hooks": True},
    ],
)
def test_reentrant_refuses_what_torch_refuses(options):
    x = torch.ones(2, 4, requires_grad=True)
    layer = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="use_reentrant=False"):
        torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True, **options)
    with pytest.raises(ValueError, match="use_reentrant=False"):
        checkpoint(layer, x, use_reentrant=True, **options)


# ---- around a call


@pytest.mark.parametrize("reentrant", [False, True])
def test_no_grad_and_inference_mode(bank, reentrant):
    x = make_tokens()["rgb"]
    with bank.active("rgb"):
        expected = run_blocks(bank.backbone.blocks, x)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                got = run_blocks(bank.backbone.blocks, x, plan=CheckpointPlan(use_reentrant=reentrant))
            assert torch.equal(got, expected)
            assert not got.requires_grad


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_that_raises_puts_the_live_state_back(bank, reentrant):
    calls = Counter()

    class Flaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = bank.backbone.blocks[0]

        def forward(self, x):
            calls["n"] += 1
            if calls["n"] == 2:
                raise KeyError("boom")
            return self.block(x)

    with bank.active("rgb"):
        y = checkpoint(Flaky(), torch.randn(1, 3, DIM), use_reentrant=reentrant)
    with bank.active("depth"):
        before = snapshot(bank.backbone)
        with pytest.raises(KeyError):
            y.sum().backward()
        bank.backbone.zero_grad(set_to_none=True)
        assert_same(snapshot(bank.backbone), before)


# ---- changes between forward and backward


def forward(bank: AdapterBank, reentrant: bool, **options) -> torch.Tensor:
    block = bank.backbone.blocks[0]
    with bank.active("rgb"):
        return (
            checkpoint(block, make_tokens(requires_grad=True)["rgb"], use_reentrant=reentrant, **options).square().sum()
        )


@pytest.mark.parametrize("reentrant", [False, True])
def test_flags_turned_off_are_an_error_that_names_the_cause(bank, reentrant):
    loss = forward(bank, reentrant, label="block 0")
    bank.model.set_adapter("depth")  # PEFT's switch freezes rgb_ft
    with pytest.raises(RecomputationError, match=r"block 0: .*rgb_ft.*set_adapter") as error:
        loss.backward()
    assert "route ['rgb', 'rgb_ft']" in str(error.value)
    assert "route ['depth']" in str(error.value)


@pytest.mark.parametrize("reentrant", [False, True])
def test_flags_follow(bank, reentrant):
    """What torch does without checkpointing: a parameter frozen before backward gets no gradient, the others theirs."""
    block = bank.backbone.blocks[0]
    with bank.active("rgb"):
        block(make_tokens()["rgb"]).square().sum().backward()
    expected = {n: p.grad.clone() for n, p in block.named_parameters() if p.grad is not None}
    bank.backbone.zero_grad(set_to_none=True)
    loss = forward(bank, reentrant, on_flags="follow")
    frozen = {n for n in expected if ".lora_A." in n}
    for name, parameter in block.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    loss.backward()
    got = {n: p.grad for n, p in block.named_parameters() if p.grad is not None}
    assert got.keys() == expected.keys() - frozen
    assert all(torch.equal(got[n], expected[n]) for n in got)
    assert not any(p.requires_grad for n, p in block.named_parameters() if n in frozen)


@pytest.mark.parametrize("reentrant", [False, True])
def test_flags_of_idle_adapters_do_not_matter(bank, reentrant):
    loss = forward(bank, reentrant)
    for _, parameter in bank.parameters("depth_ft"):
        parameter.requires_grad_(False)
    loss.backward()
    assert all(p.grad is not None for n, p in bank.parameters("rgb_ft") if ".blocks.0." in f".{n}")


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "event",
    ["scaling", "eval", "disable", "unfreeze", "another adapter", "eval forward"],
)
def test_events_in_between_change_no_gradient(event, reentrant):
    def run(is_checkpointed: bool):
        bank = make_bank(dropout=0.1)
        block = bank.backbone.blocks[0]
        torch.manual_seed(3)
        with bank.active("rgb"):
            x = make_tokens()["rgb"]
            y = checkpoint(block, x, use_reentrant=reentrant) if is_checkpointed else block(x)
        match event:
            case "scaling":
                block.attn.qkv.set_scale("rgb_ft", 7.0)
            case "eval":
                bank.backbone.eval()
            case "disable":
                block.attn.qkv._disable_adapters = True
            case "unfreeze":
                block.mlp.requires_grad_(True)
            case "another adapter":
                bank.add("late", LoraConfig(r=2, target_modules=["qkv"]), modality="audio", trainable=True)
            case "eval forward":
                with bank.active("depth"), torch.no_grad():
                    block.eval()(x)
        before = snapshot(bank.backbone)
        y.square().sum().backward()
        gradients = {n: p.grad.clone() for n, p in block.named_parameters() if p.grad is not None}
        bank.backbone.zero_grad(set_to_none=True)
        assert_same(snapshot(bank.backbone), before)
        return gradients

    expected = run(is_checkpointed=False)
    if event == "unfreeze":  # a flag turned on after the forward gives no gradient either way
        expected = {n: g for n, g in expected.items() if ".mlp" not in n}
    assert equal(run(is_checkpointed=True), expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    ("event", "message"),
    [
        (lambda bank: bank.model.merge_adapter(["rgb"]), "merge"),
        (lambda bank: bank.model.delete_adapter("rgb"), "replaced or removed"),
        (lambda bank: setattr(bank.backbone.blocks[0], "norm1", nn.LayerNorm(DIM)), "replaced or removed"),
        (lambda bank: setattr(bank.backbone.blocks[0].norm1, "weight", nn.Parameter(torch.ones(DIM))), "parameter"),
        (
            lambda bank: bank.add("late", LoraConfig(r=2, target_modules=["fc1"]), modality="rgb", trainable=True),
            "tuner layers were added|replaced",
        ),
    ],
    ids=["merge", "delete", "swap module", "swap parameter", "inject"],
)
@pytest.mark.filterwarnings("ignore:Adapter .* was active which is now deleted")  # PEFT's word on deletion
def test_events_that_cannot_be_undone_are_named(bank, event, message, reentrant):
    loss = forward(bank, reentrant, label="block 0")
    event(bank)
    with pytest.raises(RecomputationError, match=message):
        loss.backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_parameter_edited_in_place_is_an_error_as_without_checkpointing(bank, reentrant):
    def edit():
        torch.optim.SGD([p for _, p in bank.parameters("rgb_ft")], lr=0.1).step()
        with torch.no_grad():
            for _, parameter in bank.parameters("rgb_ft"):
                parameter.add_(1)

    block = bank.backbone.blocks[0]
    with bank.active("rgb"):
        plain = block(make_tokens(requires_grad=True)["rgb"]).square().sum()
    edit()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        plain.backward()
    loss = forward(bank, reentrant, label="block 0")
    edit()
    with pytest.raises(RecomputationError, match=r"block 0: 4 parameters were edited in place.*rgb_ft"):
        loss.backward()
    loss = forward(bank, reentrant)
    with torch.no_grad():
        for _, parameter in bank.parameters("depth_ft"):
            parameter.add_(1)  # another modality's adapter: nothing to do with this block's forward
    loss.backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_method_of_a_module_beside_an_unrelated_module(bank, reentrant):
    class Outer(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def run(self, x, other):
            return other(self.block(x))

    def run(blocks, x, plan):
        for block in blocks:
            function = Outer(block).run
            if plan.enabled:
                x = checkpoint(function, x, nn.Identity(), use_reentrant=reentrant)
            else:
                x = function(x, nn.Identity())
        return x

    expected = step(bank, make_tokens(), PLAIN, run)
    with bank.active("depth"):
        assert equal(step(bank, make_tokens(), CheckpointPlan(), run).gradients, expected.gradients)


# ---- plans


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"segment_size": 0}, "segment_size: expected an integer of at least 1, got 0"),
        ({"segment_size": 1.5}, "segment_size"),
        ({"segment_size": True}, "segment_size"),
        ({"segments": 0}, "segments"),
        ({"every": -1}, "every"),
        ({"every": "2"}, "every"),
        ({"segments": 2, "segment_size": 2}, "got both"),
        ({"enabled": 1}, "enabled"),
        ({"use_reentrant": None}, "use_reentrant"),
        ({"last_plain": "no"}, "last_plain"),
    ],
)
def test_wrong_plans_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        CheckpointPlan(**wrong)


def test_more_segments_than_blocks_is_refused(bank):
    with pytest.raises(ValueError, match="at most the 4 blocks, got 5"):
        run_blocks(bank.backbone.blocks, make_tokens()["rgb"], plan=CheckpointPlan(segments=5))


@pytest.mark.parametrize(("depth", "segments"), [(d, k) for d in range(1, 13) for k in range(1, d + 1)])
def test_segments_are_those_of_checkpoint_sequential(depth, segments):
    """The sizes of torch.utils.checkpoint.checkpoint_sequential, observed."""
    calls: list[int] = []

    class Mark(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

        def forward(self, x):
            calls.append(self.index)
            return x.sin()

    blocks = nn.Sequential(*[Mark(i) for i in range(depth)])
    x = torch.ones(2, requires_grad=True)
    torch.utils.checkpoint.checkpoint_sequential(blocks, segments, x, use_reentrant=False).sum().backward()
    theirs, calls[:] = list(calls), []
    run_blocks(blocks, x, plan=CheckpointPlan(segments=segments, last_plain=True)).sum().backward()
    assert calls == theirs


def test_blocks_with_further_arguments(bank):
    """An attention mask travels through the recomputation; masked positions change nothing."""
    x = make_tokens()["rgb"]
    mask = torch.zeros(5, 5).masked_fill(torch.eye(5) == 1, float("-inf"))
    gradients = []
    for plan in (PLAIN, CheckpointPlan(), CheckpointPlan(segment_size=2, use_reentrant=True)):
        bank.backbone.zero_grad(set_to_none=True)
        with bank.active("rgb"):
            run_blocks(bank.backbone.blocks, x, plan=plan, attn_mask=mask).square().sum().backward()
        gradients.append({n: p.grad.clone() for n, p in bank.backbone.named_parameters() if p.grad is not None})
    assert equal(gradients[1], gradients[0])
    assert equal(gradients[2], gradients[0])
    assert gradients[0].keys() == {n for n in trainable_names(bank) if "rgb_ft" in n}


def test_a_model_without_adapters():
    torch.manual_seed(0)
    backbone = ViViT(dim=DIM, depth=3, num_heads=2)
    x = torch.randn(2, 4, DIM)
    gradients = []
    for plan in (None, CheckpointPlan(), CheckpointPlan(use_reentrant=True)):
        backbone.zero_grad()
        backbone(x, plan).square().sum().backward()
        gradients.append([p.grad.clone() for p in backbone.parameters()])
    for other in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, gradients[0], strict=True))
