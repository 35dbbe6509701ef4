"""`checkpoint_blocks` on models that know nothing of it: the gradients of a plain run, or an error at the forward."""

import copy
import functools
import gc
import inspect
import pickle
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import timm
import torch
import transformers
from peft import LoraConfig
from timm.models.convnext import ConvNeXt
from timm.models.eva import Eva
from timm.models.mlp_mixer import MlpMixer
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from mmadapt import AdapterBank, CheckpointPlan
from mmadapt.blocks import checkpoint_blocks, remove_checkpointing
from tests.programs import assert_same, draw_adapters, relative_error, snapshot

PER_BLOCK = CheckpointPlan()
REENTRANT = CheckpointPlan(use_reentrant=True)
PAIRS = CheckpointPlan(segment_size=2)
CACHE_WARNING = "ignore:checkpoint_blocks. caching"

# PEFT asks transformers' models by the old name.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


# ---- models: tiny, random


class Block(nn.Module):
    """Attention with an optional mask (N, N), then an MLP; x: (B, N, D)."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.fc = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.norm(x)
        x = x + nn.functional.scaled_dot_product_attention(self.q(y), self.k(y), self.v(y), attn_mask=mask)
        return x + self.fc(x)


class Stack(nn.Module):
    """A hand-written stack; `loop` is how it calls its blocks, so that tests can replace it."""

    def __init__(self, depth: int = 4, loop: Callable | None = None) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(depth)])
        self.loop = loop or plain_loop

    def forward(self, x: Tensor) -> Any:
        return self.loop(self.blocks, self.embed(x))


MASK = torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1) == 1, float("-inf"))


def plain_loop(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def masked_loop(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x, mask=MASK)
    return x


@dataclass
class Case:
    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor] | Tensor]
    targets: str
    blocks: int  # how many are found
    features: Callable[[Any], Tensor] = lambda output: output


def image(size: int = 16) -> Tensor:
    return torch.randn(2, 3, size, size)


def tokens(**more: Tensor) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, 30, (2, 6)), **more}


def padded() -> dict[str, Tensor]:
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, 4:] = 0
    return tokens(attention_mask=mask)


def hidden(output: Any) -> Tensor:
    return output[0]


def hf(name: str, **config: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**config))


SMALL = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
TEXT = {"vocab_size": 32, "max_position_embeddings": 16}
IMAGE = {"image_size": 16, "patch_size": 8}
ATTENTION = r".*(query|value|q_proj|v_proj)"

CASES = {
    "hand-written": Case(Stack, lambda: torch.randn(2, 5, 4), r".*\.(q|v)", 4),
    "hand-written, mask": Case(lambda: Stack(loop=masked_loop), lambda: torch.randn(2, 5, 4), r".*\.(q|v)", 4),
    "torch encoder": Case(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3),
        lambda: torch.randn(2, 5, 8),
        r".*linear1",
        3,
    ),
    "Sequential": Case(lambda: nn.Sequential(Block(), Block(), Block()), lambda: torch.randn(2, 5, 8), r".*\.(q|v)", 3),
    "timm ViT": Case(
        lambda: VisionTransformer(
            img_size=16, patch_size=8, embed_dim=16, depth=4, num_heads=2, num_classes=3, proj_drop_rate=0.1
        ),
        image,
        r".*blocks\.\d+\.attn\.qkv",
        4,
    ),
    "timm EVA02": Case(
        lambda: Eva(
            img_size=16, patch_size=8, embed_dim=16, depth=3, num_heads=2, num_classes=3, swiglu_mlp=True,
            use_rot_pos_emb=True, qkv_fused=False,
        ),
        image,
        r".*attn\.[qv]_proj",
        3,
    ),
    "timm Swin": Case(
        lambda: SwinTransformer(
            img_size=32, patch_size=2, window_size=4, embed_dim=8, depths=(2, 2), num_heads=(2, 2), num_classes=3
        ),
        lambda: image(32),
        r".*attn\.qkv",
        4,
    ),
    "timm ConvNeXt": Case(
        lambda: ConvNeXt(depths=(1, 2, 1, 1), dims=(8, 8, 16, 16), num_classes=3),
        lambda: image(32),
        r".*mlp\.fc1",
        5,
    ),
    "timm Mixer": Case(
        lambda: MlpMixer(num_classes=0, img_size=16, patch_size=8, num_blocks=3, embed_dim=16),
        image,
        r".*mlp_tokens\.fc1",
        3,
    ),
    "timm create_model": Case(
        lambda: timm.create_model(
            "vit_tiny_patch16_224", pretrained=False, img_size=32, embed_dim=24, depth=2, num_heads=2, num_classes=3
        ),
        lambda: image(32),
        r".*attn\.qkv",
        2,
    ),
    "ViT": Case(hf("ViT", **SMALL, **IMAGE), lambda: {"pixel_values": image()}, ATTENTION, 3, hidden),
    "CLIP vision": Case(hf("CLIPVision", **SMALL, **IMAGE), lambda: {"pixel_values": image()}, ATTENTION, 3, hidden),
    "Dinov2": Case(
        hf("Dinov2", **{k: v for k, v in SMALL.items() if k != "intermediate_size"}, mlp_ratio=2, **IMAGE),
        lambda: {"pixel_values": image()},
        ATTENTION,
        3,
        hidden,
    ),
    "Vivit": Case(
        hf("Vivit", **SMALL, image_size=16, num_frames=4, tubelet_size=[2, 8, 8]),
        lambda: {"pixel_values": torch.randn(2, 4, 3, 16, 16)},
        ATTENTION,
        3,
        hidden,
    ),
    "VideoMAE": Case(
        hf("VideoMAE", **SMALL, **IMAGE, num_frames=4, tubelet_size=2),
        lambda: {"pixel_values": torch.randn(2, 4, 3, 16, 16)},
        ATTENTION,
        3,
        hidden,
    ),
    "Llama": Case(hf("Llama", **SMALL, **TEXT, num_key_value_heads=1), padded, ATTENTION, 3, hidden),
    "Qwen2": Case(hf("Qwen2", **SMALL, **TEXT, num_key_value_heads=1), padded, ATTENTION, 3, hidden),
    "Bert": Case(hf("Bert", **SMALL, **TEXT), padded, ATTENTION, 3, hidden),
    "T5": Case(
        hf("T5", vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2),
        lambda: padded() | {"decoder_input_ids": torch.randint(3, 30, (2, 4))},
        r".*Attention\.(q|v)",
        4,
        hidden,
    ),
    "Bart": Case(
        hf(
            "Bart", **TEXT, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24,
        ),
        padded,
        ATTENTION,
        4,
        hidden,
    ),
}  # fmt: skip


# ---- the program: two forwards under two adapters, one backward


class Program:
    """A model with the trainable adapters `rgb` and `depth`, both drawn at random, and one batch for each."""

    def __init__(self, case: Case, is_wrapped: bool = True, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.case = case
        self.bank = AdapterBank(case.make())
        for name in ("rgb", "depth"):
            config = LoraConfig(r=2, target_modules=case.targets)
            self.bank.add(name, config, modality=name, trainable=True)
        draw_adapters(self.bank)
        self.model: nn.Module = self.bank.model if is_wrapped else self.bank.backbone
        self.inputs = [case.inputs(), case.inputs()]

    def gradients(self) -> dict[str, Tensor]:
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        loss = torch.zeros(())
        for modality, inputs in zip(("rgb", "depth"), self.inputs, strict=True):
            with self.bank.active(modality):
                output = self.model(**inputs) if isinstance(inputs, dict) else self.model(inputs)
                features = self.case.features(output)
                loss = loss + (features * torch.linspace(-1, 1, features.numel()).view_as(features)).sum()
        with self.bank.active("depth"):
            loss.backward()
        found = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}
        self.model.zero_grad(set_to_none=True)
        return found


def equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return got.keys() == expected.keys() and all(torch.equal(got[n], expected[n]) for n in expected)


def attributes(model: nn.Module) -> list[dict]:
    """`vars` of every module, with copies of the dicts in it."""
    return [
        {name: value.copy() if isinstance(value, dict | list) else value for name, value in vars(module).items()}
        for module in model.modules()
    ]


# ---- gradients


@pytest.mark.filterwarnings(CACHE_WARNING)
@pytest.mark.parametrize("is_wrapped", [True, False], ids=["PeftModel", "model"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_a_plain_run_and_nothing_is_left(name, is_wrapped):
    program = Program(CASES[name], is_wrapped)
    before, vars_before = snapshot(program.model), attributes(program.model)
    expected = program.gradients()
    assert {n.rpartition("lora_")[2].split(".")[1] for n in expected} == {"rgb", "depth"}
    assert sum(bool(gradient.any()) for gradient in expected.values()) > 0.5 * len(expected)  # drop path zeroes some
    for plan in (PER_BLOCK, REENTRANT, CheckpointPlan(every=2))[: 3 if is_wrapped else 1]:
        names = list(program.model.state_dict())
        with checkpoint_blocks(program.model, plan) as handle:
            stacks = {n.rpartition(".")[0] for n in handle.names}
            assert plan.every == 2 or len(handle.names) == program.case.blocks, handle.names
            assert len(stacks) == (4 if "ConvNeXt" in name else 2 if name in ("timm Swin", "T5", "Bart") else 1)
            assert list(program.model.state_dict()) == names
            wrapped = snapshot(program.model)
            got = program.gradients()
            # Decoder layers share the encoder's output, whose gradients reentrant mode sums in another order.
            is_shared = name in ("T5", "Bart") and plan.use_reentrant
            assert relative_error(got, expected) < 1e-6 if is_shared else equal(got, expected), plan
            assert got.keys() == expected.keys()
            assert_same(snapshot(program.model), wrapped)
    assert_same(snapshot(program.model), before)
    assert attributes(program.model) == vars_before


@pytest.mark.filterwarnings(CACHE_WARNING)
@pytest.mark.parametrize("name", CASES)
def test_control_torchs_checkpoint_in_the_same_place_is_wrong(name):
    program = Program(CASES[name])
    expected = program.gradients()
    handle = checkpoint_blocks(program.model)
    blocks = [program.model.get_submodule(n) for n in handle.names]
    handle.remove()
    for block in blocks:

        def forward(*args, block=block, **kwargs):
            kwargs |= {key: None for key in kwargs if key in ("past_key_values", "cache", "layer_past")}
            function = functools.partial(type(block).forward, block, **kwargs)
            return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)

        vars(block)["forward"] = forward
    assert relative_error(program.gradients(), expected) > 0.1


@pytest.mark.filterwarnings(CACHE_WARNING)
@pytest.mark.parametrize("name", ["timm ViT", "ViT", "Llama", "T5"])
@pytest.mark.parametrize("plan", [PER_BLOCK, REENTRANT], ids=["non-reentrant", "reentrant"])
def test_a_model_in_eval_mode_and_one_without_adapters(name, plan):
    case = CASES[name]
    torch.manual_seed(0)
    model, inputs = case.make().eval(), case.inputs()
    calls = Counter()

    def gradients():
        model.zero_grad(set_to_none=True)
        output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
        calls.clear()
        case.features(output).square().mean().backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    inner = [m for m in model.modules() if isinstance(m, nn.Linear)]
    for module in inner:
        module.register_forward_pre_hook(lambda *_: calls.update(["inner"]))
    expected = gradients()
    assert not calls
    with checkpoint_blocks(model, plan):
        got = gradients()
        # T5's layers share their position bias, whose gradients reentrant mode sums in another order.
        assert relative_error(got, expected) < 1e-6 if name == "T5" and plan.use_reentrant else equal(got, expected)
        assert calls["inner"] > 4  # not silently off in eval mode


# ---- what the plan says


@pytest.mark.parametrize(
    ("plan", "recomputed"),
    [
        (CheckpointPlan(enabled=False), set()),
        (PER_BLOCK, {0, 1, 2, 3}),
        (REENTRANT, {0, 1, 2, 3}),
        (CheckpointPlan(every=2), {0, 2}),
        (CheckpointPlan(last_plain=True), {0, 1, 2}),
        (PAIRS, {0, 1, 2, 3}),
        (CheckpointPlan(segment_size=3, use_reentrant=True), {0, 1, 2, 3}),
        (CheckpointPlan(segment_size=2, every=2), {0, 1}),
        (CheckpointPlan(segments=2, last_plain=True), {0, 1}),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["timm ViT", "hand-written, mask"])
def test_backward_runs_the_blocks_that_the_plan_says(name, plan, recomputed):
    program = Program(CASES[name])
    expected = program.gradients()
    calls: Counter[int] = Counter()
    outside: Counter[int] = Counter()
    for i, block in enumerate(program.bank.backbone.blocks):
        next(block.children()).register_forward_pre_hook(lambda *_, i=i: calls.update([i]))
        block.register_forward_pre_hook(lambda *_, i=i: outside.update([i]))
    with checkpoint_blocks(program.model, plan) as handle:
        assert equal(program.gradients(), expected)
        assert [int(n.rpartition(".")[2]) for n in handle.names] == sorted(recomputed)
    assert calls == {i: 2 * (2 if i in recomputed else 1) for i in range(4)}  # two forwards
    assert outside == dict.fromkeys(range(4), 2)  # the block's own hooks stay outside


def test_without_grad_everything_runs_plainly():
    program = Program(CASES["timm ViT"])
    x = program.inputs[0]
    program.model.eval()
    with torch.no_grad():
        expected = program.model(x)
        with checkpoint_blocks(program.model, PAIRS):
            assert torch.equal(program.model(x), expected)
    with checkpoint_blocks(program.model, PAIRS), torch.inference_mode():
        assert torch.equal(program.model(x), expected)


# ---- segments in loops that are not ours


@pytest.mark.filterwarnings(CACHE_WARNING)
@pytest.mark.parametrize("name", ["Sequential", "torch encoder", "timm ViT", "timm Swin", "timm Mixer", "ViT", "Llama"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_segments_where_the_loop_only_hands_on(name, reentrant):
    program = Program(CASES[name])
    expected = program.gradients()
    with checkpoint_blocks(program.model, CheckpointPlan(segment_size=2, use_reentrant=reentrant)):
        assert equal(program.gradients(), expected)


def skip(number: int) -> Callable:
    def loop(blocks, x):
        for i, block in enumerate(blocks):
            if i != number:  # LayerDrop
                x = block(x)
        return x

    return loop


def collected(blocks, x):
    states = [x]
    for block in blocks:
        x = block(x)
        states.append(x)
    return {"last": x, "states": (states,)}


def read_between(blocks, x):
    for block in blocks:
        x = block(x) * 0.5
    return x


def shape_between(blocks, x):
    for block in blocks:
        x = block(x)
        assert x.shape[0]
    return x


def mask_per_layer(blocks, x):
    for block in blocks:
        x = block(x, MASK.clone())
    return x


def indexed(blocks, x):
    for block in blocks:
        x = block(x)[0]
    return x


def unpacked(blocks, x):
    for block in blocks:
        x = block(x)
        x = x[0] if isinstance(x, tuple) else x
    return x


def stopped(blocks, x):
    for block in blocks[:3]:
        x = block(x)
    return x


def edited(blocks, x):
    y = x = x * 1
    for block in blocks:
        x = block(x)
        y += 1
    return x


def no_grad_between(blocks, x):
    for i, block in enumerate(blocks):
        with torch.set_grad_enabled(i != 1):
            x = block(x)
    return x


def autocast_between(blocks, x):
    for i, block in enumerate(blocks):
        with torch.autocast("cpu", torch.bfloat16, enabled=i == 1):
            x = block(x)
    return x


def mode_between(blocks, x):
    for i, block in enumerate(blocks):
        blocks.train(i != 1)
        x = block(x)
    return x


def twice(blocks, x):
    for block in blocks:
        y = block(x)
        x = block(x)
    return y


@pytest.mark.parametrize(
    ("loop", "reason"),
    [
        (skip(0), r"blocks 0 to 1 .* block 1 was given an ordinary value"),
        (skip(1), r"blocks 0 to 1 .* expected block 1 next, got block 2 \(LayerDrop"),
        (skip(3), r"blocks 2 to 3 .* the model returns the value"),
        (collected, r"blocks 0 to 1 .* the model returns the value between two blocks \(collected hidden states"),
        (read_between, r"blocks 0 to 1 .*mul reads the value after block 0"),
        (shape_between, r"blocks 0 to 1 .*shape.* reads the value after block 0"),
        (mask_per_layer, r"blocks 0 to 1 .* block 1 is called with other arguments than block 0 \(a mask"),
        (indexed, r"blocks 0 to 1 .*__getitem__ reads the value after block 0"),
        (unpacked, r"blocks 0 to 1 .* block 0 returns a tuple"),
        (stopped, r"blocks 2 to 3 .* the model returns the value"),
        (edited, r"blocks 0 to 1 .* edited in place before block 1"),
        (no_grad_between, r"blocks 0 to 1 .* block 1 runs without grad"),
        (autocast_between, r"blocks 0 to 1 .* block 1 runs under another autocast"),
        (mode_between, r"blocks 0 to 1 .* modes or flags of a block were changed"),
        (twice, r"blocks 0 to 1 .* expected block 2 next, got block 1"),
    ],
)
def test_segments_where_the_loop_does_more_are_an_error_at_the_forward(loop, reason):
    class Pair(Block):
        def forward(self, x, mask=None):
            return super().forward(x, mask), None

    model = Stack(loop=loop)
    if loop in (indexed, unpacked):
        model.blocks = nn.ModuleList([Pair() for _ in range(4)])
    x = torch.randn(2, 5, 4)
    with checkpoint_blocks(model, PAIRS), pytest.raises(ValueError, match=rf"{reason}.*Do: segment_size=1"):
        model(x)
    with checkpoint_blocks(model, PER_BLOCK):
        model(x)  # each of these loops is right with one checkpoint per block


@pytest.mark.filterwarnings(CACHE_WARNING)
@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("T5", {}, "reads the value after block 0 of encoder.block"),
        ("Bert", {"output_hidden_states": True}, "collected hidden states"),
        ("Llama", {"output_hidden_states": True}, "collected hidden states"),
    ],
)
def test_segments_in_models_of_transformers_that_do_more(name, arguments, reason):
    case = CASES[name]
    model = case.make()
    with checkpoint_blocks(model, PAIRS), pytest.raises(ValueError, match=rf"{reason}.*Do: segment_size=1"):
        model(**case.inputs(), **arguments)


@pytest.mark.parametrize("kind", ["forward", "pre", "backward"])
def test_a_hook_that_reads_between_is_an_error(kind):
    model = Stack()
    if kind == "forward":
        model.blocks[0].register_forward_hook(lambda module, args, output: output + 1)
    elif kind == "pre":
        model.blocks[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    else:
        model.blocks[1].register_full_backward_hook(lambda *_: None)
    with checkpoint_blocks(model, PAIRS), pytest.raises(ValueError, match=r"reads the value.*Do: segment_size=1"):
        model(torch.randn(2, 5, 4))


def test_adapters_switched_between_the_blocks_of_a_segment():
    program = Program(CASES["hand-written"])
    bank, model = program.bank, program.bank.backbone

    def loop(blocks, x):
        for i, block in enumerate(blocks):
            with bank.active(("rgb", "depth")[i % 2]):
                x = block(x)
        return x

    model.loop = loop
    expected = program.gradients()
    with checkpoint_blocks(model, PER_BLOCK):
        assert equal(program.gradients(), expected)
    with checkpoint_blocks(model, PAIRS), pytest.raises(ValueError, match=r"adapters, modes.*Do: segment_size=1"):
        model(program.inputs[0])


# ---- remove, copies, what comes and goes


def test_remove_puts_back_a_forward_of_the_block_itself():
    model = Stack()
    block = model.blocks[1]
    calls = Counter()

    def own(x):
        calls.update(["own"])
        return Block.forward(block, x)

    block.forward = own
    before = attributes(model)
    handle = checkpoint_blocks(model)
    assert list(inspect.signature(model.blocks[0].forward).parameters) == ["x", "mask"]
    model(torch.randn(2, 5, 4)).sum().backward()
    assert calls["own"] == 2
    handle.remove()
    model.zero_grad(set_to_none=True)
    assert attributes(model) == before
    block.forward = "another"
    handle.remove()
    assert block.forward == "another"


def test_a_forward_that_somebody_put_over_ours_runs_plainly_after_remove():
    model = Stack()
    handle = checkpoint_blocks(model)
    calls = Counter()
    model.blocks[0].norm.register_forward_pre_hook(lambda *_: calls.update([0]))
    inner = model.blocks[0].forward
    model.blocks[0].forward = lambda x: inner(x)
    handle.remove()
    model(torch.randn(2, 5, 4)).sum().backward()
    assert calls[0] == 1


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("plan", [PER_BLOCK, PAIRS], ids=["blocks", "pairs"])
@pytest.mark.parametrize("name", ["hand-written", "timm ViT", "ViT"])
def test_a_copy_runs_its_own_weights_and_is_checkpointed(how, plan, name):
    case = CASES[name]
    torch.manual_seed(0)
    model, inputs = case.make().eval(), case.inputs()
    calls: Counter[str] = Counter()

    def run(which):
        which.zero_grad(set_to_none=True)
        output = case.features(which(**inputs) if isinstance(inputs, dict) else which(inputs))
        output.square().mean().backward()
        return {n: p.grad.clone() for n, p in which.named_parameters() if p.grad is not None}

    if isinstance(model, Stack):
        model.loop = plain_loop
    handle = checkpoint_blocks(model, plan)
    run(model)
    model.zero_grad(set_to_none=True)
    other = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    before = {n: p.grad for n, p in model.named_parameters()}
    got = run(other)
    assert all(p.grad is before[n] for n, p in model.named_parameters())
    handle.remove()
    first = other.get_submodule(handle_names(other)[0])
    next(m for m in first.modules() if not list(m.children())).register_forward_pre_hook(
        lambda *_: calls.update(["inner"])
    )
    assert equal(run(other), got)
    assert calls["inner"] == 2  # the original's remove() does not touch the copy
    remove_checkpointing(other)
    calls.clear()
    assert equal(run(other), got)
    assert calls["inner"] == 1
    assert not any("forward" in vars(m) or m._forward_pre_hooks for m in other.modules() if list(m.children()))
    remove_checkpointing(other)


def handle_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


def test_a_copy_of_one_block_is_no_copy_of_the_model():
    model = Stack()
    checkpoint_blocks(model)
    block = copy.deepcopy(model.blocks[1])
    assert block.forward.block is block
    assert len(pickle.dumps(block)) < 0.5 * len(pickle.dumps(model))
    model.blocks[2] = block  # and is taken over when it is put into the model
    x = torch.randn(2, 5, 4)
    model.eval()(x).sum().backward()
    remove_checkpointing(model)
    got = block.q.weight.grad.clone()
    model.zero_grad()
    model(x).sum().backward()
    assert torch.equal(got, block.q.weight.grad)
    assert not handle_names(model)


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda bank: pickle.loads(pickle.dumps(bank))], ids=["deepcopy", "pickle"]
)
def test_a_copy_of_a_bank_switches_the_adapters_of_its_own_blocks(how):
    program = Program(CASES["timm ViT"])
    expected = program.gradients()
    checkpoint_blocks(program.model, PAIRS)
    program.bank = how(program.bank)
    assert program.bank.model is not program.model
    remove_checkpointing(program.model)
    program.model = program.bank.model
    assert all(block.forward.block is block for block in program.bank.backbone.blocks)
    assert equal(program.gradients(), expected)


@pytest.mark.parametrize("plan", [PER_BLOCK, REENTRANT, PAIRS], ids=["non-reentrant", "reentrant", "pairs"])
def test_remove_between_forward_and_backward(plan):
    model, x = Stack().eval(), torch.randn(2, 5, 4)
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with checkpoint_blocks(model, plan):
        y = model(x)
    y.sum().backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))


@pytest.mark.parametrize("plan", [PER_BLOCK, PAIRS], ids=["blocks", "pairs"])
def test_an_adapter_added_while_it_is_on(plan):
    program = Program(CASES["timm ViT"], is_wrapped=False)
    with checkpoint_blocks(program.model, plan):
        program.gradients()
        config = LoraConfig(r=2, target_modules=r".*mlp\.fc1")
        program.bank.add("third", config, modality="rgb", trainable=True)
        draw_adapters(program.bank)
        got = program.gradients()
    assert any(".third." in name for name in got)
    assert equal(got, program.gradients())


def test_a_model_with_its_handle_is_freed():
    model = Stack()
    checkpoint_blocks(model, PAIRS)
    model(torch.randn(2, 5, 4)).sum().backward()
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None


def test_a_second_call_is_refused_until_removed():
    model = Stack()
    handle = checkpoint_blocks(model)
    for target in (model, nn.ModuleDict({"inner": model})):
        with pytest.raises(ValueError, match=r"not checkpointed yet.*blocks\.0.*remove\(\)"):
            checkpoint_blocks(target)
    handle.remove()
    checkpoint_blocks(model).remove()


def test_blocks_that_come_and_go():
    model = Stack()
    calls: Counter[int] = Counter()
    handle = checkpoint_blocks(model, CheckpointPlan(every=2))
    gone = model.blocks[0]
    model.blocks = nn.ModuleList([Block() for _ in range(3)])
    for i, block in enumerate(model.blocks):
        block.norm.register_forward_pre_hook(lambda *_, i=i: calls.update([i]))
    model(torch.randn(2, 5, 4)).sum().backward()
    assert calls == {0: 2, 1: 1, 2: 2}
    assert "forward" not in vars(gone)
    model.blocks.append(Block())
    model(torch.randn(2, 5, 4)).sum().backward()
    assert handle.names == ["blocks.0", "blocks.2"]
    assert "forward" in vars(model.blocks[3])
    handle.remove()
    assert not handle_names(model)


def test_blocks_that_are_not_there_yet_need_a_pattern():
    model = Stack(depth=0)
    with pytest.raises(ValueError, match=r"found none.*pass blocks="):
        checkpoint_blocks(model)
    handle = checkpoint_blocks(model, blocks="blocks")
    with pytest.warns(UserWarning, match=r"blocks='blocks' by now, got none"):
        model(torch.randn(2, 5, 4))
    model.blocks.extend([Block(), Block()])
    model(torch.randn(2, 5, 4))
    assert handle.names == ["blocks.0", "blocks.1"]


def test_a_second_list_that_comes_later():
    model = Tree(encoder=Tree(layers=blocks(2)))
    model.forward = lambda x: x
    handle = checkpoint_blocks(model, blocks=r"(en|de)coder\.layers")
    model.decoder = Tree(layers=blocks(1))
    model(torch.ones(1))
    assert handle.names == ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0"]


# ---- which blocks


class Tree(nn.Module):
    """Modules by attribute."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


def blocks(count: int) -> nn.ModuleList:
    return nn.ModuleList([Block() for _ in range(count)])


def experts() -> Tree:
    return Tree(norm=nn.LayerNorm(8), experts=blocks(4))


@pytest.mark.parametrize(
    ("model", "spec", "expected"),
    [
        (Tree(encoder=Tree(layers=blocks(2)), decoder=Tree(layers=blocks(1))), None, "encoder.layers decoder.layers"),
        (Tree(body=blocks(2), heads=nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])), None, "body"),
        (Tree(blocks=blocks(5), extra=nn.ModuleList([Tree(fc=nn.Linear(2, 2))])), None, "blocks"),
        (Tree(all=nn.Sequential(Tree(blocks=blocks(2)), Tree(blocks=blocks(1)))), None, "all.0.blocks all.1.blocks"),
        (Tree(blocks=nn.Sequential(*[nn.Sequential(Block()) for _ in range(2)])), None, "blocks.0 blocks.1"),
        (Tree(layers=nn.ModuleList([experts() for _ in range(2)])), None, "layers"),
        (Tree(layers=nn.ModuleList([Tree(moe=Tree(of=blocks(4))) for _ in range(2)])), None, "layers"),
        (Tree(a=Tree(blocks=blocks(1)), b=Tree(blocks=blocks(1))), r"b\.blocks", "b.blocks"),
        (Tree(a=Tree(blocks=blocks(1)), b=Tree(blocks=blocks(1))), r"..blocks\.\d+", "a.blocks b.blocks"),
        (Tree(blocks=blocks(2)), r"blocks(\.\d+)?", "blocks"),
        (Tree(layer1=nn.Sequential(Block(), Block()), layer2=nn.Sequential(Block())), r"layer\d", "layer1 layer2"),
        (Tree(layers=nn.ModuleList([nn.ModuleList([Block(), nn.Linear(8, 8)])])), r"layers\.\d", "layers.0"),
    ],
    ids=str,
)  # fmt: skip
def test_blocks_are_found(model, spec, expected):
    with checkpoint_blocks(model, blocks=spec) as handle:
        assert " ".join(dict.fromkeys(name.rpartition(".")[0] for name in handle.names)) == expected


def test_blocks_are_given():
    model = Tree(a=blocks(2), b=blocks(2))
    for given in (model.b, list(model.b), [model.b], iter(model.b)):
        with checkpoint_blocks(model, blocks=given) as handle:
            assert handle.names == ["b.0", "b.1"]
    with checkpoint_blocks(model, PAIRS, blocks=[*model.a, *model.b]) as handle:
        assert len({id(f.stack) for f in handle._forwards}) == 2  # a segment does not reach over two lists


def test_a_block_used_twice():
    block = Block()
    model = Stack(depth=0)
    model.blocks.extend([block, block])
    model.eval()
    x = torch.randn(2, 5, 4)
    model(x).sum().backward()
    expected = block.q.weight.grad.clone()
    model.zero_grad()
    with pytest.raises(ValueError, match="same block several times"):
        checkpoint_blocks(model, PAIRS)
    with checkpoint_blocks(model):
        model(x).sum().backward()
    assert torch.allclose(block.q.weight.grad, expected, rtol=0, atol=1e-6)
    assert "forward" not in vars(block)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"blocks": [Block()]}, r"modules below the model, got Block\. Lists in it: blocks \(4 Block\)"),
        ({"blocks": []}, "got none"),
        ({"blocks": "("}, "regular expression"),
        ({"blocks": r"blocks\.0(\.fc)?"}, r"hold each other, but blocks\.0 holds blocks\.0\.fc"),
        ({"plan": {"rgb": PER_BLOCK}}, "one CheckpointPlan"),
        ({"plan": CheckpointPlan(segments=5)}, "at most the 4 blocks, got 5"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_and_nothing_is_written(arguments, message):
    model = Stack()
    before = attributes(model)
    with pytest.raises(ValueError, match=message):
        checkpoint_blocks(model, **arguments)
    assert attributes(model) == before


def test_no_blocks_lists_what_there_is():
    model = Tree(
        stem=nn.Sequential(nn.Linear(2, 2), nn.GELU()), mixed=nn.ModuleList([Block(), Tree(fc=nn.Linear(2, 2))])
    )
    with pytest.raises(ValueError, match=r"found none.*stem \(2 GELU/Linear\), mixed \(2 Block/Tree\).*pass blocks="):
        checkpoint_blocks(model)


# ---- the libraries' own switches


@pytest.mark.filterwarnings(CACHE_WARNING)
@pytest.mark.parametrize("name", ["timm ViT", "timm Swin", "timm ConvNeXt", "ViT", "Llama", "Bart"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_their_own_checkpointing_is_off_while_ours_is_on(name, when):
    program = Program(CASES[name], is_wrapped=name != "ViT")
    expected = program.gradients()
    model = program.bank.backbone

    def switch():
        if isinstance(model, transformers.PreTrainedModel):
            model.activation_checkpointing_enable()
        else:
            model.set_grad_checkpointing(True)

    def switches():
        names = ("gradient_checkpointing", "grad_checkpointing")
        return [vars(m)[n] for m in model.modules() for n in names if n in vars(m)]

    theirs = torch.utils.checkpoint.checkpoint
    calls: Counter[str] = Counter()
    if when == "before":
        switch()
        before = attributes(program.model)
    with checkpoint_blocks(program.model) as handle:
        if when == "after":
            switch()
        block = program.model.get_submodule(handle.names[0])
        inner = next(m for m in block.modules() if isinstance(m, nn.LayerNorm) or "RMSNorm" in type(m).__name__)
        hook = inner.register_forward_pre_hook(lambda *_: calls.update(["inner"]))
        assert equal(program.gradients(), expected)
        assert calls["inner"] == 4  # two forwards, two recomputations: not checkpointed twice
        assert not any(switches())
        hook.remove()
    assert any(switches())
    if when == "before":
        assert attributes(program.model) == before
    assert torch.utils.checkpoint.checkpoint is theirs


def test_a_cache_is_not_filled_twice():
    case = CASES["Llama"]
    model, inputs = case.make(), case.inputs()
    with checkpoint_blocks(model):
        with pytest.warns(UserWarning, match="use_cache=False"):
            output = model(**inputs, use_cache=True)
        assert output.past_key_values.get_seq_length() == 0
        model(**inputs, use_cache=True)  # one warning
        with torch.no_grad():
            cache = model(input_ids=inputs["input_ids"], use_cache=True).past_key_values
            assert cache.get_seq_length() == 6
        with pytest.raises(ValueError, match=r"block 0: expected no cache or an empty one.*no_grad"):
            model(input_ids=inputs["input_ids"][:, :1], cache=cache)
        assert cache.get_seq_length() == 6
