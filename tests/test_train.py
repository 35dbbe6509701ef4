import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import mmadapt.__main__
from mmadapt.train import main

Tiny = Callable[..., list[str]]
PRETRAIN = "+experiment=vivit_pretrain"  # the shortest whole run


def test_the_table_says_what_came_out_and_where_it_lies(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(tiny(PRETRAIN, "baselines=true", "trainer.enable_progress_bar=true")) == 0
    said = capsys.readouterr()
    for part in ("accelerometer", "gyroscope", "logistic regression", "random forest", "macro F1", "total"):
        assert part in said.out
    assert "held activations" in said.out
    paths = dict(re.findall(r"^(results|logs|checkpoints|pretrain): +(.+)$", said.out, re.MULTILINE))
    assert set(paths) == {"results", "logs", "checkpoints", "pretrain"}
    assert all(Path(path).exists() for path in paths.values())
    results = json.loads(Path(paths["results"]).read_text())
    assert results["accuracy"]["logistic regression"]["all"] > 0.6
    assert (Path(paths["logs"]) / "pretrain" / "metrics.csv").is_file()
    assert "1/1 pretrain" in said.err
    assert "Warning" not in said.err
    assert "GPU" not in said.err
    assert not [line for line in said.err.splitlines() if line.strip() and "pretrain" not in line]

    assert main(tiny(PRETRAIN, "baselines=false")) == 0
    assert "Found on disk, not run again: pretrain" in capsys.readouterr().out


def test_a_multirun_runs_each_and_ends_with_the_mean(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(tiny(PRETRAIN, "-m", "seed=1,2")) == 0
    said = capsys.readouterr().out
    assert "seed 1" in said
    assert "seed 2" in said
    assert "mean and deviation of 2 runs" in said
    assert len(list((tmp_path / "outputs").glob("sweeps/*/*/*/results.json"))) == 2
    assert len(list((tmp_path / "outputs").glob("stages/pretrain-*"))) == 2


def test_what_is_wrong_in_a_sweep_is_said_before_its_first_run(tiny: Tiny, tmp_path: Path) -> None:
    assert main(tiny(PRETRAIN, "-m", "checkpointing=blocks,blokcs")) == 1
    assert not (tmp_path / "outputs").exists()


def test_the_configuration_is_printed_without_running(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mmadapt.train", PRETRAIN, "seed=7", "--cfg", "job"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "seed: 7" in done.stdout
    assert "stage: pretrain" in done.stdout
    assert not os.listdir(tmp_path)


def test_commands_are_dispatched(capsys: pytest.CaptureFixture[str]) -> None:
    assert mmadapt.__main__.main(["--help"]) == 0
    assert "mmadapt train" in capsys.readouterr().out
    assert mmadapt.__main__.main(["trian"]) == 1
    assert "Did you mean train?" in capsys.readouterr().err
    assert mmadapt.__main__.main(["train", "experiment=vivit_multi"]) == 1
    assert "+experiment=vivit_multi" in capsys.readouterr().err


def test_ctrl_c_leaves_a_checkpoint_and_the_command_that_goes_on(tiny: Tiny, tmp_path: Path) -> None:
    """A real SIGINT to a real process; its own words are then run, and the result is that of an undisturbed run."""
    args = tiny(PRETRAIN, "trainer.limit_train_batches=10")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "mmadapt.train", *args, "trainer.max_epochs=200"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    # the first epoch's checkpoint says that training is on
    while not list(tmp_path.glob("outputs/runs/*/*/checkpoints/*/last.ckpt")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    (path,) = re.findall(r"a checkpoint that resumes lies in (.+)", err)
    checkpoint = torch.load(path, weights_only=True)
    step = checkpoint["global_step"]
    assert 0 < step < 2000
    assert not any(".mlp." in key for key in checkpoint["ema"]["parameters"] if "backbone" not in key)
    assert not list(tmp_path.glob("outputs/stages/pretrain-*"))

    (command,) = re.findall(r"go on with: (.+)", err)
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "mmadapt.train"]
    assert words[-1] == f"resume={path}"
    # a resumed run must be the same run: other epochs are another configuration
    assert main([*(w for w in words[3:] if not w.startswith("trainer.max_epochs")), "trainer.max_epochs=1"]) == 1


def test_resume_last_goes_on_from_the_newest_checkpoint_of_the_same_stage(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mmadapt.callbacks import StepTimer
    from mmadapt.config import compose
    from mmadapt.results import StageResult
    from mmadapt.stages import Stages

    def run(*more: str) -> StageResult:
        return Stages(compose(tiny(PRETRAIN, "trainer.max_epochs=3", *more))).pretrain()

    whole = run(f"paths.stages={tmp_path / 'whole'}")
    start = StepTimer.on_train_batch_start

    def interrupting(self: StepTimer, *args: object) -> None:
        start(self, *args)  # type: ignore[arg-type]
        if len(self.seconds) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    from mmadapt.callbacks import Interrupted

    with monkeypatch.context() as patched:
        patched.setattr(StepTimer, "on_train_batch_start", interrupting)
        with pytest.raises(Interrupted) as caught:
            run()
    newest = caught.value.path
    torn = newest.with_name("torn.ckpt")
    torn.write_bytes(newest.read_bytes()[:1000])
    resumed = run("resume=last")
    said = capsys.readouterr().err
    assert f"resuming pretrain from {newest}" in said
    assert "torn.ckpt" in said
    assert resumed.metrics == whole.metrics
    assert resumed.details["steps"] == whole.details["steps"] == 6


def test_a_file_that_is_no_checkpoint_is_refused(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.ckpt").write_bytes(b"nothing")
    torch.save({"state_dict": {}}, tmp_path / "b.ckpt")
    assert main(tiny(PRETRAIN, f"resume={tmp_path / 'a.ckpt'}")) == 1
    assert "weights_only=True" in capsys.readouterr().err
    assert main(tiny(PRETRAIN, f"resume={tmp_path / 'b.ckpt'}")) == 1
    assert "names no stage" in capsys.readouterr().err


def test_threads_are_set_for_the_run_only(tiny, monkeypatch):
    from mmadapt.config import compose
    from mmadapt.stages import Stages
    from mmadapt.train import train

    seen = []
    run = Stages.run
    monkeypatch.setattr(Stages, "run", lambda self: (seen.append(torch.get_num_threads()), run(self))[1])
    before = torch.get_num_threads()
    train(compose(tiny("+experiment=vivit_pretrain", f"threads={before + 1}")), show=False)
    assert seen == [before + 1]
    assert torch.get_num_threads() == before
