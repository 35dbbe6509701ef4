"""`python -m mmadapt.train +experiment=vivit_multi`: configuration in, table out.

from mmadapt.config import compose
from mmadapt.train import train
results = train(compose(["+experiment=vivit_multi", "data.fold=1"]))
"""

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from mmadapt.config import (
    CONFIG_NAME,
    VERSION_BASE,
    ConfigError,
    check_command_line,
    conf_dir,
    fail,
    flags_last,
    prepare_overrides,
    want_traceback,
)

__all__ = ["main", "train"]

INTERRUPTED = 130  # the exit code of a program that Ctrl-C stopped

# Mistakes of a user and of the machine: one message. All others are mistakes of ours and keep their traceback.
EXPECTED = (ConfigError, ValueError, ImportError, OSError)


def train(cfg: Any, *, show: bool = True) -> dict[str, Any]:
    """Runs the stages that a configuration asks for and the classical baselines; returns what results.json holds.

    Args:
        cfg: of `mmadapt.config.compose`.
        show: print the tables.

    Raises:
        ConfigError: before anything is built or written.
        Interrupted: Ctrl-C during a fit; its `path` is the checkpoint to go on from.
    """
    # imported here: `--help` and `--cfg job` need neither torch nor Lightning
    from mmadapt.build import cpu_threads, settled
    from mmadapt.files import write_json
    from mmadapt.report import print_report, summarise
    from mmadapt.stages import Stages

    with settled():
        stages = Stages(cfg)
        with cpu_threads(stages.cfg["threads"]):
            run = stages.run_folder
            baselines = stages.baselines()
            results = stages.run()
    last = list(results.values())[-1]
    paths = {"results": run / "results.json", last.name: last.folder}
    if (adapters := _adapters(last.folder)) is not None:
        paths["adapters"] = adapters
    paths |= {"logs": run / "logs", "checkpoints": run / "checkpoints"}
    there = {what: str(path.resolve()) for what, path in paths.items() if what == "results" or path.exists()}
    summary = summarise(results, baselines, there, stages.cfg)
    write_json(summary, run / "results.json")
    if show:
        print_report(summary)
    return summary


def _adapters(folder: Path) -> Path | None:
    return next((path for path in (folder / "adapters", folder / "adapter") if path.is_dir()), None)


def main(args: list[str] | None = None) -> int:
    """The command line: Hydra's, with `++` where it is needed, and one message for what is wrong."""
    # Before torch is imported: OpenMP's threads else spin while they wait for each other, and on cores that something
    # else uses too a step takes ten times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    given = list(sys.argv[1:] if args is None else args)
    runs: list[dict[str, Any]] = []
    try:
        prepared = flags_last(prepare_overrides(given))
        if not any(
            arg in ("--help", "-h", "--hydra-help", "--version") or arg.startswith(("--config", "-c", "-s", "--shell"))
            for arg in given
            if not arg.startswith("--cfg")
        ):
            check_command_line([arg for arg in prepared if "=" in arg or arg.startswith("~")])
        return _hydra(prepared, given, runs)
    except EXPECTED as e:
        if want_traceback():
            raise
        return fail(e)
    except KeyboardInterrupt:
        print(f"\nmmadapt: interrupted; go on with: {_command(given, 'last')}", file=sys.stderr)
        return INTERRUPTED


def _hydra(prepared: list[str], given: list[str], runs: list[dict[str, Any]]) -> int:
    import hydra

    def task(cfg: Any) -> float | None:
        from mmadapt.callbacks import Interrupted

        try:
            summary = train(cfg)
        except EXPECTED as e:
            if want_traceback():
                raise
            _remove_husk(Path(cfg.paths.run))
            sys.exit(fail(e))
        except Interrupted as e:
            print(
                f"mmadapt: interrupted; a checkpoint that resumes lies in {e.path.resolve()}\n"
                f"go on with: {_command(given, str(e.path.resolve()))}",
                file=sys.stderr,
            )
            sys.exit(INTERRUPTED)
        runs.append(summary)
        return summary["test"].get("test/accuracy")

    before = sys.argv
    sys.argv = [before[0], *prepared]
    try:
        hydra.main(config_path=str(conf_dir()), config_name=CONFIG_NAME, version_base=VERSION_BASE)(task)()
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else int(e.code is not None)
    finally:
        sys.argv = before
    if len(runs) > 1:
        from mmadapt.report import print_sweep

        print_sweep(runs)
    return 0


def _remove_husk(folder: Path) -> None:
    """Remove the folder of a refused run, where nothing but Hydra's own record of it lies."""
    if folder.is_dir() and {path.name for path in folder.iterdir()} <= {".hydra", "train.log"}:
        shutil.rmtree(folder)


def _command(given: list[str], resume: str) -> str:
    kept = [arg for arg in given if not arg.startswith("resume=")]
    return shlex.join(["python", "-m", "mmadapt.train", *kept, f"resume={resume}"])


if __name__ == "__main__":
    sys.exit(main())
