"""The conf folder is found from a checkout, an editable install and a wheel, whatever the working directory is."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROBE = "import mmadapt.config as c; print(c.conf_dir()); print(c.compose(['+experiment=vivit_multi', 'seed=7']).seed)"


def probe(path: Path | None, cwd: Path, setup: str = "") -> tuple[Path, str]:
    """The conf folder that a fresh interpreter finds from another working directory."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, "-P", "-c", setup + PROBE],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    folder, seed = done.stdout.splitlines()
    return Path(folder), seed


def build(kind: str, target: Path) -> Path:
    """A wheel as pip has it built, by the same backend, unpacked as pip unpacks it."""
    hook = {"wheel": "build_wheel", "editable": "build_editable"}[kind]
    script = f"import hatchling.build as b; print(b.{hook}({str(target)!r}))"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True)
    (wheel,) = target.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target / "site")
    return target / "site"


def test_from_a_checkout(tmp_path: Path) -> None:
    assert probe(ROOT, tmp_path) == (ROOT / "conf", "7")


def test_from_a_wheel(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="comes with the extra test")
    site = build("wheel", tmp_path)
    assert probe(site, tmp_path) == (site / "mmadapt" / "conf", "7")
    packaged = {p.relative_to(site / "mmadapt" / "conf") for p in (site / "mmadapt" / "conf").rglob("*.yaml")}
    assert packaged == {p.relative_to(ROOT / "conf") for p in (ROOT / "conf").rglob("*.yaml")}
    assert (site / "mmadapt" / "data" / "watch.py").is_file()
    (entry,) = site.glob("*.dist-info/entry_points.txt")
    assert "mmadapt = mmadapt.__main__:main" in entry.read_text()


def test_from_an_editable_install(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="comes with the extra test")
    site = build("editable", tmp_path)
    # a .pth file, which Python reads in site folders alone
    assert probe(None, tmp_path, f"import site; site.addsitedir({str(site)!r}); ") == (ROOT / "conf", "7")


def test_the_version_is_one() -> None:
    import mmadapt

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == mmadapt.__version__


def test_everything_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[\[<>=]", name)[0] for name in project["dependencies"]}
    names = {"hydra": "hydra-core"}
    imported = set()
    for file in (ROOT / "mmadapt").rglob("*.py"):
        imported |= set(re.findall(r"^(?:from|import) ([a-z_]+)", file.read_text(), re.MULTILINE))
    third_party = imported - set(sys.stdlib_module_names) - {"mmadapt"}
    assert {names.get(name, name) for name in third_party} <= declared


def test_importing_is_cheap_and_the_data_package_is_not_ignored() -> None:
    script = "import sys, mmadapt, mmadapt.config; assert not {'torch', 'lightning', 'peft'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)
    ignored = subprocess.run(["git", "check-ignore", "-q", "mmadapt/data/watch.py"], cwd=ROOT, check=False)
    assert ignored.returncode != 0
