"""radixrt serves language models to agents: every token prefix is computed once.

    from radixrt import Client, Sampling, assistant, gen, program, select, system, user

The names are imported when they are first used, so that a worker or a router loads nothing of this.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from radixrt.version import __version__ as __version__

if TYPE_CHECKING:
    from radixrt.client import AsyncClient, CacheOutcome, Client, Completion, ServerError
    from radixrt.lang.branch import Branch, join
    from radixrt.lang.budget import Budget
    from radixrt.lang.errors import BudgetExceeded, NoWinner, ProgramError
    from radixrt.lang.nodes import assistant, gen, role, select, system, user
    from radixrt.lang.plain import SyncBranch
    from radixrt.lang.program import Program, program, use_client
    from radixrt.lang.race import race
    from radixrt.lang.tools import Tool
    from radixrt.lang.trace import Trace, trace
    from radixrt.lang.values import Value
    from radixrt.messages import (
        CacheAction,
        ChatPrompt,
        Grammar,
        Origin,
        PartsPrompt,
        Sampling,
        TextPrompt,
        TokenPrompt,
        Usage,
    )

__all__ = [
    "AsyncClient", "Branch", "Budget", "BudgetExceeded", "CacheAction", "CacheOutcome", "ChatPrompt", "Client",
    "Completion", "Grammar", "NoWinner", "Origin", "PartsPrompt", "Program", "ProgramError", "Sampling", "ServerError",
    "SyncBranch", "TextPrompt", "TokenPrompt", "Tool", "Trace", "Usage", "Value", "assistant", "gen", "join", "program",
    "race", "role", "select", "system", "trace", "use_client", "user",
]  # fmt: skip
_HOME = (
    dict.fromkeys(__all__, "radixrt.lang")
    | dict.fromkeys(("AsyncClient", "CacheOutcome", "Client", "Completion", "ServerError"), "radixrt.client")
    | dict.fromkeys(("ChatPrompt", "Grammar", "Origin", "PartsPrompt", "Sampling", "TextPrompt"), "radixrt.messages")
    | dict.fromkeys(("CacheAction", "TokenPrompt", "Usage"), "radixrt.messages")
)

if not TYPE_CHECKING:  # or else any name could be imported, for what type checkers know

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'radixrt' has no attribute {name!r}")
        return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
