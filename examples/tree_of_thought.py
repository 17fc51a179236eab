"""Game of 24: fork, propose steps, score all, keep the best.   radixrt run examples/tree_of_thought.py"""

import asyncio
import re

from radixrt import Branch, gen, program, select

PUZZLES = [(4, 5, 6, 10), (1, 2, 4, 7), (3, 3, 8, 8)]
PROMPT = """Use each number once, with + - * /, to get 24. Write a step a line, with what is left.
Numbers: 4 4 6 8
4 + 8 = 12 (left: 4 6 12)
6 - 4 = 2 (left: 2 12)
2 * 12 = 24 (left: 24)
Numbers: """
STEP = r"[0-9]{1,3} [-+*/] [0-9]{1,3} = [0-9]{1,3} \(left: [0-9]{1,3}( [0-9]{1,3}){0,2}\)\n"


def left_after(numbers: list[int], step: str) -> list[int] | None:
    """The numbers that are left after a step; None if the step is wrong."""
    a, operation, b, result = re.match(r"(\d+) (.) (\d+) = (\d+)", step).groups()
    rest = list(numbers)
    for number in (int(a), int(b)):
        if number not in rest:
            return None
        rest.remove(number)
    right = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b), "/": int(a) / max(int(b), 1)}
    return [*rest, int(result)] if right[operation] == int(result) else None


@program
async def tree_of_thought(s: Branch, puzzle: tuple[int, ...], width: int = 4, keep: int = 2) -> str:
    s += PROMPT + " ".join(map(str, puzzle)) + "\n"
    frontier = [(s, list(puzzle))]
    for depth in range(len(puzzle) - 1):
        thoughts = [(child, numbers) for branch, numbers in frontier for child in branch.fork(width)]
        for number, (thought, _) in enumerate(thoughts):
            thought += gen("step", regex=STEP, max_tokens=40, temperature=1.0, seed=100 * depth + number)
        judges = [
            thought.fork(1)[0] for thought, _ in thoughts
        ]  # judged in a fork, so that the judgement does not become part of the thought
        for judge in judges:
            judge += "Can 24 be reached from what is left? "
            judge += select("likely", ["sure", "impossible"])
        values = await asyncio.gather(*(judge.value("likely") for judge in judges))
        scores = [value.scores["sure"] - value.scores["impossible"] for value in values]
        steps = [await thought["step"] for thought, _ in thoughts]
        after = [left_after(numbers, step) for (_, numbers), step in zip(thoughts, steps, strict=True)]
        ranked = sorted(range(len(thoughts)), key=lambda i: (after[i] is None, -scores[i]))
        frontier = [(thoughts[i][0], after[i]) for i in ranked[:keep] if after[i] is not None]
        if not frontier:
            return f"no right step after {depth}"
    solved = [branch for branch, numbers in frontier if numbers == [24]]
    return "solved: " + await solved[0]["step"] if solved else "24 was not reached"


if __name__ == "__main__":
    for numbers in PUZZLES:
        print(*numbers, "->", tree_of_thought.run(numbers).strip())
