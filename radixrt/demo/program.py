"""The demonstration's program: a plan, three views that fork off it, a choice, a summary."""

from __future__ import annotations

from radixrt.lang import Branch, assistant, gen, program, select, system, user
from radixrt.messages import Sampling

RULES = "You help with a cache of token prefixes. " + "Answer from the handbook, in one sentence, and say why. " * 12
BRIEF = Sampling(max_tokens=24, temperature=0.7, ignore_eos=True)


@program
async def advise(s: Branch, question: str, views: int = 3) -> list[tuple[str, str, int, int]]:
    """(what, text, prompt tokens, cached tokens) of each step."""
    s += system(RULES)
    s += user(question)
    s += assistant(gen("plan", BRIEF, seed=1))
    branches = s.fork(views)
    for number, branch in enumerate(branches, 1):
        branch += user(f"Look at it from side {number}.")
        branch += assistant(gen("view", BRIEF, seed=number))
    texts = [await branch["view"] for branch in branches]
    s += user("These are the views:\n" + "\n".join(texts) + "\nIs the plan good?")
    s += assistant("The plan is ", select("verdict", ["good", "bad"]), ". ", gen("summary", BRIEF, seed=9))
    steps = [("plan", await s.value("plan"))]
    steps += [(f"  view {number}", await branch.value("view")) for number, branch in enumerate(branches, 1)]
    steps += [("verdict", await s.value("verdict")), ("summary", await s.value("summary"))]
    return [(what, value.text, value.usage.prompt_tokens, value.usage.cached_tokens) for what, value in steps]
