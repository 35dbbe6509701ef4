"""aLoRA, whose offsets travel as forward hooks that are gone when a block is recomputed: two inputs in one step."""

import pytest
import torch
import transformers
from peft import LoraConfig
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from mmadapt import AdapterBank, CheckpointPlan, checkpoint_blocks
from tests.programs import assert_same, draw_adapters, make_backbone, relative_error, snapshot

TOKENS = {"rgb": [5, 6], "audio": [9]}
PROMPTS = {"rgb": [[1, 2, 5, 6, 3, 4], [5, 6, 1, 1, 1, 1]], "audio": [[9, 3, 3], [3, 9, 9]]}

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:aLoRA is currently only supported for CAUSAL_LM"),  # said of the ViT's
]


def alora(invocation: list[int] | None, **more) -> LoraConfig:
    return LoraConfig(r=2, alora_invocation_tokens=invocation, task_type="CAUSAL_LM", **more)


def decoder_bank() -> AdapterBank:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes)).train()
    bank = AdapterBank(model)
    for modality, invocation in TOKENS.items():
        for name in (modality, f"{modality}_ft"):
            config = alora(invocation, target_modules=["q_proj", "v_proj"])
            bank.add(name, config, modality=modality, trainable=name.endswith("_ft"))
    draw_adapters(bank)
    return bank


def step(bank: AdapterBank) -> dict[str, Tensor]:
    """Both prompts forward, each under its own adapters, one backward."""
    bank.model.zero_grad(set_to_none=True)
    losses = []
    for modality, prompt in PROMPTS.items():
        with bank.active(modality):
            ids = torch.tensor(prompt)
            losses.append(bank.model(input_ids=ids, labels=ids, use_cache=False).loss)
    torch.stack(losses).sum().backward()
    return {n: p.grad.clone() for n, p in bank.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("reentrant", [False, True])
def test_two_prompts_in_one_step(reentrant):
    bank = decoder_bank()
    expected = step(bank)
    assert len(expected) == 2 * 3 * 2 * 2  # modalities, layers, q and v, A and B
    assert all(float(g.abs().max()) > 0 for g in expected.values())
    before = snapshot(bank.model)
    with checkpoint_blocks(bank.model, CheckpointPlan(use_reentrant=reentrant)) as handle:
        assert len(handle.names) == 3
        got = step(bank)
        assert got.keys() == expected.keys()
        for name, gradient in expected.items():
            assert torch.equal(got[name], gradient), name
    assert_same(snapshot(bank.model), before)


def test_control_peft_refuses_the_second_prompt():
    bank = decoder_bank()
    bank.backbone.activation_checkpointing_enable()
    with pytest.raises(ValueError, match="Multiple invocations of PEFT forward hooks"):
        step(bank)


def test_transformers_own_switch_left_on_does_not_matter():
    bank = decoder_bank()
    expected = step(bank)
    with checkpoint_blocks(bank.model):
        bank.backbone.activation_checkpointing_enable()  # as an old configuration would
        got = step(bank)
    assert all(torch.equal(got[name], gradient) for name, gradient in expected.items())


def vit_step(checkpoint=None, reentrant: bool = False) -> dict[str, Tensor]:
    """The same on a ViT of timm, whose offsets are given by the caller."""
    torch.manual_seed(0)
    bank = AdapterBank(make_backbone("timm"))
    for modality, invocation in TOKENS.items():
        config = LoraConfig(r=2, alora_invocation_tokens=invocation, target_modules=["attn.qkv", "attn.proj"])
        bank.add(modality, config, modality=modality, trainable=True)
    draw_adapters(bank)
    if checkpoint is torch_checkpoint:
        for block in bank.backbone.blocks:
            forward = block.forward
            block.forward = lambda x, f=forward, **kw: torch_checkpoint(f, x, use_reentrant=reentrant, **kw)
    elif checkpoint is not None:
        checkpoint(bank.backbone, CheckpointPlan(use_reentrant=reentrant))
    loss = torch.zeros(())
    images = torch.randn(2, 3, 8, 8)
    for modality, offsets in {"rgb": [5, 3], "audio": [None, 5]}.items():
        with bank.active(modality):
            loss = loss + bank.model(images, alora_offsets=offsets).square().mean()
    loss.backward()
    return {n: p.grad.clone() for n, p in bank.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("reentrant", [False, True])
def test_offsets_given_to_a_vit(reentrant):
    expected = vit_step()
    assert all(float(g.abs().max()) > 0 for g in expected.values())
    got = vit_step(checkpoint_blocks, reentrant)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], gradient) for name, gradient in expected.items())


def test_control_torchs_checkpoint_loses_the_offsets():
    expected = vit_step()
    try:
        got = vit_step(torch_checkpoint)
    except torch.utils.checkpoint.CheckpointError:
        return  # another number of saved tensors: torch saw it
    assert relative_error(got, expected) > 0.1


def test_peft_looks_for_the_tokens_of_the_active_modality():
    bank = decoder_bank()
    seen = []
    layer = bank.backbone.model.layers[0].self_attn.q_proj
    handle = layer.register_forward_hook(
        lambda _, args, kwargs, output: seen.append(kwargs["alora_offsets"]), with_kwargs=True
    )
    before = bank.model.active_adapter
    with torch.no_grad():
        for modality, prompt in PROMPTS.items():
            with bank.active(modality):
                bank.model(input_ids=torch.tensor(prompt))
    handle.remove()
    assert bank.model.active_adapter == before
    assert seen == [[4, 6], [3, 1]]  # from the last occurrence of the tokens to the end of the row


def test_two_sequences_on_one_route_are_refused():
    bank = decoder_bank()
    with pytest.raises(ValueError, match=r"expected the alora_invocation_tokens of 'rgb_ft' .* \[5, 6\], got \[7\]"):
        bank.add("other", alora([7], target_modules=["q_proj"]), modality="rgb", trainable=True)
    bank.add("other", alora(None, target_modules=["q_proj"]), modality="rgb", trainable=True)  # a plain LoRA beside it


def test_rows_are_refused():
    bank = decoder_bank()
    with pytest.raises(ValueError, match=r"invocation tokens, got \['rgb_ft', 'audio_ft'\]"), bank.active(rows=["rgb"]):
        pass
