"""Configuration: where conf/ lies, composing it, instantiating from it, and one clear message for what is wrong.

sys.argv -> prepare_overrides (no `+` needed where a mapping is open) -> compose -> mmadapt.validate -> train(cfg)
"""

import difflib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

VERSION_BASE = "1.3"
CONFIG_NAME = "train"

# Packages whose objects a config may name as `_target_`; the config key `allow` adds to it. torch as a whole is not
# among them: torch.load and torch.hub run code from files.
ALLOWED = ("mmadapt", "torch.nn", "torch.optim", "torchmetrics", "lightning", "peft", "timm")

# Mappings that take names which no YAML lists: an override below one of them is added if it is not there yet, and the
# name is checked afterwards (mmadapt/validate.py), so that nobody has to know when Hydra wants a `+`.
OPEN = (
    "adapters.lora",
    "adapters.modality",
    "adapters.pretrained",
    "tokenizer.modality",
    "tokenizer.pretrained",
    "optim.adapter",
    "optim.tokenizer",
    "optim.fusion",
    "optim.head",
    "optim.backbone",
    "trainer",
    "logger",
    "stages",
)
# Values that are paths: quoted for Hydra's grammar, which gives `=`, `,`, brackets and spaces a meaning.
PATHS = ("resume", "backbone.weights", "adapters.pretrained", "tokenizer.pretrained", "data.path", "paths")

_OVERRIDE = re.compile(r"(?P<prefix>\+\+|\+|)(?P<key>[A-Za-z_][\w./@:-]*)=(?P<value>.*)", re.DOTALL)


class ConfigError(ValueError):
    """What a user typed or configured is wrong: says what was expected, what was got, what is valid and what to do."""


def conf_dir() -> Path:
    """The folder of YAML files: `mmadapt/conf` in an installed wheel, else `conf` beside `mmadapt` in a checkout.

    Raises:
        ConfigError: neither is there.
    """
    package = Path(__file__).resolve().parent
    candidates = (package / "conf", package.parent / "conf")
    for folder in candidates:
        if (folder / f"{CONFIG_NAME}.yaml").is_file():
            return folder
    raise ConfigError(
        f"expected {CONFIG_NAME}.yaml in {candidates[0]} (wheel) or {candidates[1]} (checkout), found neither; "
        "install mmadapt again"
    )


def choices(group: str) -> list[str]:
    """The files of a config group, or the groups themselves for ""."""
    folder = conf_dir() / group
    if not group:
        return sorted(path.name for path in folder.iterdir() if path.is_dir())
    return sorted(path.stem for path in folder.glob("*.yaml"))


def closest(name: str, valid: Iterable[str]) -> str:
    """' Did you mean X?' for the valid name that is most like `name`, or ''."""
    matches = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.55)
    return f" Did you mean {matches[0]}?" if matches else ""


def check_names(what: str, names: Iterable[Any], valid: Sequence[str], remedy: str) -> None:
    """Refuses a name that is not among the valid ones.

    Raises:
        ConfigError: lists expected, got, the valid names, the closest one, and the remedy.
    """
    for name in names:
        if name not in valid:
            hint = closest(str(name), valid)
            raise ConfigError(
                f"{what}: expected one of the valid names, got {name!r}.{hint} Valid: [{', '.join(valid)}]. {remedy}"
            )


def prepare_overrides(args: Sequence[str]) -> list[str]:
    """Command-line arguments as Hydra needs them: `++` where a mapping is open, quotes around paths, overrides last.

    Flags (`-m`, `--cfg job`) and deletions (`~key`) pass as they are. Hydra's parser takes overrides in one piece only,
    so `+experiment=NAME -m seed=1,2` would fail as users type it: the flags go first.

    Raises:
        ConfigError: `experiment=NAME` without its `+`.
    """
    prepared = []
    for arg in args:
        match = None if arg.startswith(("-", "~")) else _OVERRIDE.fullmatch(arg)
        if match is None:
            prepared.append(arg)
            continue
        prefix, key, value = match["prefix"], match["key"], match["value"]
        if key == "experiment" and not prefix:
            check_names("experiment", [value], choices("experiment"), "Experiments are files of conf/experiment.")
            raise ConfigError(
                f"expected +experiment={value} (with a plus: an experiment is added to the configuration), "
                f"got {arg}; write +experiment={value}"
            )
        if not prefix and _below(key, OPEN) and key not in OPEN:  # logger=csv chooses a file
            prefix = "++"
        if _below(key, PATHS) and value not in ("null", "") and not re.fullmatch(r"[\w./:~-]+", value):
            value = _quoted(value)
        prepared.append(f"{prefix}{key}={value}")
    return sorted(prepared, key=lambda arg: not arg.startswith("-") and ("=" in arg or arg.startswith("~")))


def flags_last(args: Sequence[str]) -> list[str]:
    """The overrides, then the flags with their values: Hydra's parser takes overrides in one piece only."""
    overrides = [arg for arg in args if ("=" in arg and not arg.startswith("-")) or arg.startswith("~")]
    return [*overrides, *(arg for arg in args if arg not in overrides)]


def _below(key: str, names: Sequence[str]) -> bool:
    return any(key == name or key.startswith(name + ".") for name in names)


def _quoted(value: str) -> str:
    if value[:1] in "'\"$" or "${" in value:
        return value  # quoted or interpolated by the user
    return "'" + value.replace("'", "\\'") + "'"


def compose(overrides: Sequence[str] = (), *, config_name: str = CONFIG_NAME) -> DictConfig:
    """The configuration that the command line with these overrides would run, for tests, scripts and notebooks.

    `paths.run` is set to a folder of this moment below `paths.output` unless an override gives it, since only the
    command line has Hydra's run folder.

    Raises:
        ConfigError: an override that does not parse, or names what is not there.
    """
    prepared = prepare_overrides(overrides)
    cfg = _compose(prepared, config_name)
    if not any(_key(o) == "paths.run" for o in prepared):
        stamp = f"{os.getpid()}-{len(_COMPOSED)}"
        _COMPOSED.append(stamp)
        cfg.paths.run = str(Path(cfg.paths.output) / "runs" / str(cfg.name) / stamp)
    return cfg


_COMPOSED: list[str] = []  # makes run folders of one process distinct


def _key(override: str) -> str:
    return override.lstrip("+").split("=", 1)[0]


def _compose(prepared: Sequence[str], config_name: str = CONFIG_NAME) -> DictConfig:
    folder = str(conf_dir())
    # hydra.compose needs the global Hydra; a caller's own initialisation is put back afterwards
    state = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with translated(prepared), hydra.initialize_config_dir(folder, version_base=VERSION_BASE):
            return hydra.compose(config_name, overrides=list(prepared))
    finally:
        GlobalHydra.instance().clear()
        if state is not None:
            GlobalHydra.instance().hydra = state


def check_command_line(args: Sequence[str]) -> None:
    """Composes what a command line asks for before Hydra runs it, values of sweeps included: a mistake is one message.

    Raises:
        ConfigError: as compose.
    """
    overrides = [arg for arg in args if not arg.startswith("-")]
    with translated(overrides):
        parsed = OverridesParser.create().parse_overrides(overrides)
    sweeps = [o for o in parsed if o.is_sweep_override()]
    plain = [o.input_line or "" for o in parsed if not o.is_sweep_override()]
    output = _compose(plain).paths.output
    if not output:
        raise ConfigError(f"paths.output: expected a folder, got {output!r}; write paths.output=outputs")
    from mmadapt.validate import writable  # it needs names from here

    writable("paths.output", Path(output))  # Hydra makes the run's folder before anything of ours runs
    for sweep in sweeps:
        # one sweep at a time: each of its values, the other sweeps left at their defaults
        if sweep.is_discrete_sweep() and not str(sweep.input_line).partition("=")[2].startswith("glob("):
            for value in sweep.sweep_string_iterator():
                _compose([*plain, f"{sweep.get_key_element()}={value}"])


@contextmanager
def translated(overrides: Sequence[str] = ()) -> Iterator[None]:
    """Turns Hydra's and OmegaConf's exceptions into a ConfigError that says what to do."""
    try:
        yield
    except OverrideParseException as e:
        raise ConfigError(
            f"expected an override key=value, got {e.override!r} ({str(e).splitlines()[0]}); quote what has commas, "
            "brackets, spaces or '=' for Hydra and for the shell: 'modalities=[accelerometer]'"
        ) from e
    except MissingConfigException as e:
        raise ConfigError(_missing(e)) from e
    except (ConfigCompositionException, OmegaConfBaseException) as e:
        raise ConfigError(_unknown_key(e)) from e
    except HydraException as e:
        raise ConfigError(f"the configuration does not compose: {e}") from e


def _missing(error: MissingConfigException) -> str:
    match = re.search(r"Could not (?:find|load) '([^']+)'", str(error))
    group, _, name = (match.group(1) if match else str(error.missing_cfg_file)).rpartition("/")
    if group in choices(""):
        valid = choices(group)
        plus = "+" if group == "experiment" else ""
        hint = closest(name, valid)
        return (
            f"{group}: expected a file of conf/{group}, got {name!r}; valid: [{', '.join(valid)}].{hint} "
            f"Write {plus}{group}=NAME with one of them"
        )
    return f"the configuration does not compose: {error}"


def _unknown_key(error: Exception) -> str:
    text = str(error)
    match = re.search(r"Could not (?:override|append to config|delete from config)[^']*'([^']+)'", text)
    if match is None:
        return f"the configuration does not compose: {text.splitlines()[0]}"
    key = match.group(1).split("=")[0].lstrip("+")
    valid = flat_keys(_compose([]))
    if key in choices("") or "defaults list" in text:
        groups = [g for g in choices("") if g not in ("experiment", "hydra", "paths")]
        return (
            f"expected a config group with a file of it, or key=value, got {key!r}; groups: [{', '.join(groups)}]."
            f"{closest(key, [*groups, *valid])} Write group=NAME, or +experiment=NAME for an experiment"
        )
    parent = key.rpartition(".")[0]
    siblings = [k for k in valid if k.rpartition(".")[0] == parent]
    if not siblings:
        top = key.partition(".")[0]
        siblings = [k for k in valid if k.startswith(top + ".")] or sorted({k.partition(".")[0] for k in valid})
    # the same last part elsewhere is the likelier wish than a similar spelling: fold -> data.fold
    named = [k for k in valid if k.rpartition(".")[2] == key.rpartition(".")[2]]
    hint = f" Did you mean {named[0]}?" if named else closest(key, valid)
    return (
        f"expected a key of the configuration, got {key!r}; valid there: [{', '.join(siblings)}].{hint} "
        "`--cfg job` prints all of it"
    )


def flat_keys(cfg: DictConfig) -> list[str]:
    """Dotted names of all keys: ['data', 'data.fold', ...], without looking through interpolations."""
    keys: list[str] = []

    def walk(node: Any, prefix: str) -> None:
        for key, value in node.items():
            keys.append(f"{prefix}{key}")
            if isinstance(value, dict):
                walk(value, f"{prefix}{key}.")

    walk(OmegaConf.to_container(cfg, resolve=False), "")
    return keys


def instantiate(config: Mapping[str, Any] | DictConfig, *args: Any, allow: Sequence[str] = (), **kwargs: Any) -> Any:
    """Builds the object that `_target_` names from the config's values and these arguments; all instantiation is here.

    Args:
        config: plain mapping or DictConfig; containers reach the object as plain lists and dicts.
        allow: package prefixes beside ALLOWED.

    Raises:
        ConfigError: a target outside of the allowed packages, one that does not exist, or arguments that it refuses.
    """
    if isinstance(config, DictConfig):
        container: Any = OmegaConf.to_container(config, resolve=True)
    else:
        container = dict(config)
    for target in _targets(container):
        _check_target(target, (*ALLOWED, *allow))
    try:
        return hydra.utils.instantiate(container, *args, _convert_="all", **kwargs)
    except InstantiationException as e:
        cause = e.__cause__
        if isinstance(cause, ImportError):
            raise
        reason = str(cause) if cause is not None else str(e).splitlines()[0]
        if isinstance(cause, ConfigError | ValueError | OSError):
            raise ConfigError(reason) from e
        if cause is None or isinstance(cause, TypeError | AttributeError):
            raise ConfigError(
                f"{container.get('_target_')}: expected arguments that it takes, got "
                f"{sorted(map(str, container))}; {reason}"
            ) from e
        raise cause from e


def _targets(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping | DictConfig):
        if "_target_" in node:
            yield str(node["_target_"])
        for value in node.values():
            yield from _targets(value)
    elif isinstance(node, list | tuple | ListConfig):
        for value in node:
            yield from _targets(value)


def _check_target(target: str, allowed: Sequence[str]) -> None:
    remedy = "Add your package by 'allow=[mypackage]' if you trust it"
    if not _below(target, allowed):
        raise ConfigError(f"_target_: expected an object of [{', '.join(allowed)}], got {target!r}. {remedy}")
    try:
        found = hydra.utils.get_object(target)
    except Exception as e:
        reason = "; ".join(line.strip() for line in str(e).splitlines())
        raise ConfigError(f"_target_: expected an object that exists, got {target!r} ({reason})") from e
    # mmadapt.config.os.system is below mmadapt by its name only: what it is decides
    home = getattr(found, "__module__", None) or ""
    if not _below(home, allowed):
        raise ConfigError(
            f"_target_: expected an object of [{', '.join(allowed)}], got {target!r}, which is of "
            f"{home or 'no module'}. {remedy}"
        )


def plain(config: Any) -> Any:
    """A config node as plain Python: dicts, lists, numbers, strings."""
    return OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config


def want_traceback() -> bool:
    return os.environ.get("HYDRA_FULL_ERROR", "") not in ("", "0")


def fail(error: BaseException) -> int:
    """Prints the one message that a user gets, on stderr; returns the exit code 1."""
    message = str(error) or type(error).__name__
    print(f"mmadapt: {message}", file=sys.stderr)
    return 1
