"""Each example runs, and its output says what its text says."""

import runpy
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_peft_2832(capsys):
    results = runpy.run_path(str(EXAMPLES / "peft_2832.py"))["main"]()
    assert "wrong" in capsys.readouterr().out
    assert len({result["loss"] for result in results.values()}) == 1  # no loss shows it
    right = {name for name, result in results.items() if result["right"]}
    assert right == {"none", "mmadapt", "torch, whole backbone"}
    for name in results.keys() - right:
        *earlier, last = results[name]["errors"].values()
        assert min(earlier) > 0.5 > last
    peak = {name: result["peak"] for name, result in results.items()}
    assert peak["mmadapt"] < 0.5 * peak["torch, whole backbone"] < 0.5 * peak["none"]
