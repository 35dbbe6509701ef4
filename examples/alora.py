"""aLoRA with two inputs in one step: adapters that act from their invocation tokens on, under checkpointing.

PEFT itself refuses a second forward before backward when checkpointing is on. Compared with the run without it.

    python examples/alora.py
"""

import torch
from peft import LoraConfig
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from mmadapt import AdapterBank, checkpoint_blocks

INVOCATION = {"question": [5, 6], "answer": [9]}  # the tokens from which on an adapter acts
PROMPTS = {"question": [[1, 2, 5, 6, 3, 4], [5, 6, 1, 1, 1, 1]], "answer": [[9, 3, 3], [3, 9, 9]]}


def make_bank() -> AdapterBank:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
    bank = AdapterBank(LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)))
    for name, tokens in INVOCATION.items():
        config = LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], alora_invocation_tokens=tokens, task_type="CAUSAL_LM",
            init_lora_weights=False,  # B is not zero: every gradient is there to compare
        )  # fmt: skip
        bank.add(name, config, modality=name, trainable=True)
    return bank


def gradients(bank: AdapterBank) -> dict[str, Tensor]:
    """Both inputs forward, each under its own adapter, one backward."""
    bank.model.zero_grad()
    loss = torch.zeros(())
    for name, prompt in PROMPTS.items():
        with bank.active(name):  # PEFT looks for the tokens of the active adapter
            ids = torch.tensor(prompt)
            loss = loss + bank.model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return {name: p.grad.clone() for name, p in bank.model.named_parameters() if p.grad is not None}


def main() -> bool:
    bank = make_bank()
    expected = gradients(bank)
    with checkpoint_blocks(bank.model):
        got = gradients(bank)
    is_equal = got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in got)
    print(f"{len(got)} gradients with checkpointing, equal to those without: {is_equal}")
    return is_equal


if __name__ == "__main__":
    main()
