"""`mmadapt NAME ...` is `python -m mmadapt.NAME ...`."""

import importlib
import importlib.util
import sys
from collections.abc import Sequence

from mmadapt.config import ConfigError, check_names, fail

# Each is a module with a `main(args) -> int`; listed here once it exists.
COMMANDS = ("train",)

USAGE = f"""usage: mmadapt {{{",".join(COMMANDS)}}} ...

  mmadapt train +experiment=vivit_multi    the same as python -m mmadapt.train +experiment=vivit_multi
  mmadapt train --cfg job                  the configuration
"""


def main(args: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if args is None else args)
    if not given or given[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    try:
        check_names("command", given[:1], COMMANDS, "`mmadapt --help` shows how.")
    except ConfigError as e:
        return fail(e)
    return importlib.import_module(f"mmadapt.{given[0]}").main(given[1:])


if __name__ == "__main__":
    sys.exit(main())
