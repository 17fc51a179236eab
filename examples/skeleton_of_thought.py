"""Writes the outline of an answer, then all points in parallel.   radixrt run examples/skeleton_of_thought.py"""

import sys

from radixrt import Branch, assistant, gen, program, user

QUESTION = "How do I keep a bicycle in good order?"


@program
async def skeleton_of_thought(s: Branch, question: str, points: int = 4) -> str:
    s += user(f"{question}\nWrite only the skeleton: {points} points of three to five words, one a line.")
    parts: list = []
    for number in range(1, points + 1):
        parts += [f"{number}.", gen(f"point {number}", max_tokens=12, temperature=0, stop="\n"), "\n"]
    s += assistant(*parts)
    branches = s.fork(points)
    for number, branch in enumerate(branches, 1):
        branch += user(f"Write two sentences on point {number}, and nothing else.")
        branch += assistant(gen("text", max_tokens=64, temperature=0))
    titles = [(await s[f"point {number}"]).strip() for number in range(1, points + 1)]
    texts = [(await branch["text"]).strip() for branch in branches]
    return "\n".join(f"{title}: {text}" for title, text in zip(titles, texts, strict=True))


if __name__ == "__main__":
    print(skeleton_of_thought.run(" ".join(sys.argv[1:]) or QUESTION))
