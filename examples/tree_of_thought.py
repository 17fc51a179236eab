"""Search over thoughts: fork, propose, score all, keep the best.   radixrt run examples/tree_of_thought.py"""

import asyncio

from radixrt import Branch, gen, program, select

PROMPT = "Use the numbers 4, 5, 6 and 10 to get 24. Write one step at a time, each an equation.\n"


@program
async def tree_of_thought(s: Branch, depth: int = 2, width: int = 4, keep: int = 2) -> list[str]:
    s += PROMPT
    frontier = [s]
    for step in range(1, depth + 1):
        thoughts = [child for branch in frontier for child in branch.fork(width)]
        for number, thought in enumerate(thoughts):
            thought += f"Step {step}:"
            thought += gen("step", max_tokens=24, temperature=1.0, seed=number, stop="\n")
        judges = [thought.fork(1)[0] for thought in thoughts]
        for judge in judges:
            judge += "\nIs this step right? "
            judge += select("right", ["yes", "no"])
        values = await asyncio.gather(*(judge.value("right") for judge in judges))
        scores = [value.scores["yes"] - value.scores["no"] for value in values]
        ranked = sorted(range(len(thoughts)), key=lambda i: -scores[i])
        frontier = [thoughts[i] for i in ranked[:keep]]
        for branch in frontier:
            branch += "\n"
    return [await branch["step"] for branch in frontier]


if __name__ == "__main__":
    print(*tree_of_thought.run(), sep="\n")
