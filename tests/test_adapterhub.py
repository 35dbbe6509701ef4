"""The real `adapters` package, which pins an older transformers, in an environment of its own."""

import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_adapterhub_under_our_checkpoint(tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    install = subprocess.run(
        [python, "-m", "pip", "install", "-q", "adapters==1.3.0", "torch"], capture_output=True, text=True, check=False
    )
    if install.returncode:
        pytest.skip(f"needs a package index that has adapters 1.3.0: {install.stderr[-300:]}")
    run = subprocess.run(
        [python, ROOT / "tests/scripts/adapterhub.py"],
        capture_output=True, text=True, check=False, env={"PYTHONPATH": str(ROOT)}, cwd=tmp_path,
    )  # fmt: skip
    sys.stdout.write(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "mmadapt: relative error 0\n" in run.stdout
    assert "transformers' own: CheckpointError" in run.stdout  # the control
