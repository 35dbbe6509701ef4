"""What a measured figure was measured on, to lie beside it."""

import os
import platform
from importlib.metadata import version
from typing import Any

__all__ = ["machine_and_versions"]


def machine_and_versions(*packages: str) -> dict[str, Any]:
    """The processor, its cores, and the versions of Python, torch, peft, timm and of further packages."""
    names = ("torch", "peft", "timm", *packages)
    return {
        "machine": {"processor": _processor(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), **{name: version(name) for name in names}},
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            models = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        models = []
    return models[0] if models else platform.processor() or platform.machine()
