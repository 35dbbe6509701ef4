"""The README's commands and program run as they are written (the two install commands: .ci/run and its own pytest)."""

import re
import shlex
from pathlib import Path

import pytest

from mmadapt.train import main

TEXT = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TEXT, flags=re.DOTALL)
COMMANDS = [
    line
    for language, block in BLOCKS
    if language == "bash"
    for line in block.splitlines()
    if line.startswith("python -m mmadapt.train")
]


def test_the_readme_holds_what_is_tested_here():
    assert len(COMMANDS) >= 12
    assert sum(language == "python" for language, _ in BLOCKS) == 1
    assert "<!-- example" not in TEXT  # every placeholder was filled in


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command, tiny, tmp_path, monkeypatch, quiet):
    """With a tiny model and two batches an epoch, unless the command itself says otherwise."""
    monkeypatch.chdir(tmp_path)
    args = shlex.split(command, comments=True)[3:]
    if "resume=last" in args:
        assert main([*tiny(), *(a for a in args if a != "resume=last")]) == 0
    assert main([*tiny(), *args]) == 0


def test_program(tmp_path, monkeypatch):
    import torch

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    scope: dict = {}
    exec(next(block for language, block in BLOCKS if language == "python"), scope)
    assert (tmp_path / "outputs/rgb_ft/adapter_model.safetensors").is_file()
    bank = scope["bank"]
    for name in bank.names:
        assert all((p.grad is not None) == (name in bank.trainable) for _, p in bank.parameters(name))
