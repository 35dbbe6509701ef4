"""AdapterHub under mmadapt: the contexts of `adapters` are thread-local stacks, which `register_state` restores.

    python tests/scripts/adapterhub.py   # in an environment with adapters 1.3 and without PEFT

A small BERT with a bottleneck adapter and a LoRA for each of two inputs, one backward. Prints the relative error of the
gradients against the run without checkpointing; exits with 1 if ours differ, or if the control does not.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import adapters
import torch
from adapters import AdapterSetup
from adapters.composition import Stack
from adapters.context import ForwardContext
from transformers import BertConfig, BertModel

from mmadapt import checkpoint_blocks, register_state

NAMES = ("rgb", "depth")


def adapterhub_state() -> Callable[[], AbstractContextManager]:
    """What a forward of AdapterHub reads beside its modules: the two stacks of contexts of the thread that runs it."""
    stacks = (AdapterSetup.get_contexts, ForwardContext.get_contexts)
    then = [list(stack()) for stack in stacks]

    @contextmanager
    def restored() -> Iterator[None]:
        now = [list(stack()) for stack in stacks]  # perhaps on another thread, with stacks of its own
        for stack, contexts in zip(stacks, then, strict=True):
            stack()[:] = contexts
        try:
            yield
        finally:
            for stack, contexts in zip(stacks, now, strict=True):
                stack()[:] = contexts

    return restored


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
    model = BertModel(BertConfig(vocab_size=32, max_position_embeddings=16, attn_implementation="eager", **sizes))
    adapters.init(model)
    for name in NAMES:
        model.add_adapter(name, config="double_seq_bn")
        model.add_adapter(f"{name}_lora", config="lora")
    model.train_adapter([name for n in NAMES for name in (n, f"{n}_lora")])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.2)
    return model.train()


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    loss = torch.zeros(())
    for i, name in enumerate(NAMES):
        with AdapterSetup(Stack(f"{name}_lora", name)):
            ids = torch.randint(32, (2, 6 + i))
            loss = loss + model(input_ids=ids).last_hidden_state.square().mean()
    model.set_active_adapters("depth")
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def error(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    zero = torch.zeros(())
    return max(float((got.get(n, zero) - g).norm() / g.norm().clamp_min(1e-12)) for n, g in expected.items())


def main() -> int:
    model = make_model()
    expected = gradients(model)
    used = [name for name, g in expected.items() if float(g.abs().max()) > 0]
    print(f"{len(used)} parameters with a gradient, of {len([p for p in model.parameters() if p.requires_grad])}")
    errors = {}
    handle = register_state(adapterhub_state)
    with checkpoint_blocks(model) as blocks:
        errors["mmadapt"] = error(gradients(model), expected)
        print(f"blocks: {blocks.names}")
    handle.remove()
    try:
        with checkpoint_blocks(model):
            errors["mmadapt without register_state"] = error(gradients(model), expected)
    except Exception as raised:  # what it is depends on what runs without its context
        print(f"mmadapt without register_state: {type(raised).__name__}: {str(raised)[:100]}")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        errors["transformers' own"] = error(gradients(model), expected)
    except Exception as raised:
        print(f"transformers' own: {type(raised).__name__}: {str(raised)[:100]}")
    for name, value in errors.items():
        print(f"{name}: relative error {value:.3g}")
    is_wrong_without = all(value > 0.1 for name, value in errors.items() if name != "mmadapt")
    return 0 if errors["mmadapt"] == 0 and used and is_wrong_without else 1


if __name__ == "__main__":
    sys.exit(main())
