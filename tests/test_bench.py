"""The bench's arithmetic against hand-made times, and its command line; not the figures themselves."""

import json

import pytest

from mmadapt import bench
from mmadapt.bench import Figure, by_turns, figure, main


def test_a_figure_is_the_median_with_an_interval_around_it():
    got = figure("x", [1.0, 2.0, 3.0, 4.0, 100.0], "us", target=3.0)
    assert got.value == 3.0
    assert 1.0 <= got.low <= got.value <= got.high <= 100.0
    assert got.is_met
    assert not figure("x", [4.0], "us", target=3.0).is_met
    assert figure("x", [4.0], "us").is_met


def test_arms_take_turns_and_the_first_turn_is_dropped(monkeypatch):
    order, clock = [], iter(range(100))
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(clock))
    taken = by_turns([lambda: order.append("a"), lambda: order.append("b")], pairs=2, calls=1)
    assert order == ["b", "a", "a", "b", "b", "a"]
    assert taken == [[1, 1], [1, 1]]


@pytest.mark.parametrize(("value", "code"), [(1.0, 0), (3.0, 1)])
def test_the_command_prints_writes_and_exits(monkeypatch, tmp_path, capsys, value, code):
    monkeypatch.setitem(bench.BENCHES, "switch", lambda: [Figure("a switch", value, "us", 0.5, 1.5, 2.0)])
    file = tmp_path / "out.json"
    assert main(["switch", "--json", str(file)]) == code
    shown = capsys.readouterr().out
    assert "a switch" in shown
    assert ("missed" if code else "met") in shown
    assert json.loads(file.read_text())["figures"][0]["value"] == value
    assert list(tmp_path.iterdir()) == [file]


def test_the_list_names_all(capsys):
    assert main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in bench.BENCHES)
    with pytest.raises(SystemExit):
        main(["nothing"])


def test_a_switch_is_measured():
    """The bench itself, short."""
    figures = {f.what: f for f in bench.switch()}
    ours, theirs = figures["AdapterBank.active, 80 layers"], figures["PEFT's set_adapter"]
    assert 0 < ours.value < theirs.value / 10
