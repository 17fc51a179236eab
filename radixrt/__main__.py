"""`python -m radixrt` is the command `radixrt`."""

from __future__ import annotations

import importlib
import os
import signal
import sys


def main(module: str = "radixrt.cli") -> int:
    """Run the `main` of a module. Ctrl-C ends it without a traceback, also while it is imported; the exit code is 130
    then. What it has begun in threads, such as to load a model, is not waited for."""
    try:
        code: int = importlib.import_module(module).main()
    except KeyboardInterrupt:
        code = 130
    if code == 130:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
