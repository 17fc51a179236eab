"""radixrt serves language models to agents: every token prefix is computed once.

    from radixrt import Client, Sampling, assistant, gen, program, select, system, user

The names are imported when they are first used, so that a worker or a router loads nothing of this.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "radixrt.client": ("AsyncClient", "Client", "Completion", "ServerError"),
    "radixrt.messages": (
        "ChatPrompt", "Grammar", "Origin", "PartsPrompt", "Sampling", "TextPrompt", "TokenPrompt", "Usage",
    ),
    "radixrt.lang": (
        "Branch", "Budget", "BudgetExceeded", "NoWinner", "Program", "ProgramError", "SyncBranch", "Trace", "Value",
        "assistant", "gen", "join", "program", "race", "role", "select", "system", "trace", "use_client", "user",
    ),
}  # fmt: skip
_HOME = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'radixrt' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
