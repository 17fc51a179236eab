"""Programs that branch: text, roles, `gen`, `select`, `fork`, `join`.

    @program
    async def debate(s: Branch, question: str) -> str:
        s += system("You are terse.")
        s += user(question)
        s += assistant(gen("plan", max_tokens=64))
        views = s.fork(3)
        for i, view in enumerate(views):
            view += user(f"Take view {i}.")
            view += assistant(gen("view", temperature=0.8))
        s += user("\\n".join([await view["view"] for view in views]))
        s += assistant(select("verdict", ["yes", "no"]))
        return await s["verdict"]

    debate.run(client, question="...")        # or: await debate(async_client, question="...")

Also: `race` takes the first branch with an acceptable result and stops the others, `s.tool(f, ...)` calls a function
while the branch waits, `s.run_tools("answer", [f, g])` lets the model call functions until it answers, `await other(s,
...)` runs another program on the branch, `with s.budget(tokens=..., seconds=...)` limits what a part of the program may
spend, and `with trace() as t` records what was done and when.

The nodes of a branch are executed in order by one task; `+=` never waits. What was said so far is a state at the
server, in token ids: each request sends only what is new, a fork is one message, and generated text keeps its token ids
in the prompt, so that the next turn finds all of it in the cache. While a tool runs, the server knows that the branch
waits, and keeps its prefix cached. If the server has forgotten a state, everything is sent again.
"""

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

__all__ = [
    "Branch",
    "Budget",
    "BudgetExceeded",
    "NoWinner",
    "Program",
    "ProgramError",
    "SyncBranch",
    "Tool",
    "Trace",
    "Value",
    "assistant",
    "gen",
    "join",
    "program",
    "race",
    "role",
    "select",
    "system",
    "trace",
    "use_client",
    "user",
]
