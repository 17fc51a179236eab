"""Many chains of thought for one question; a majority vote decides.   radixrt run examples/self_consistency.py"""

import sys
from collections import Counter

from radixrt import Branch, gen, program

QUESTION = "A train leaves at 9:40 and arrives at 11:15. It stops for 10 minutes. How many minutes does it move?"


@program
async def self_consistency(s: Branch, question: str, chains: int = 8) -> tuple[str, int]:
    s += f"Question: {question}\nLet us think step by step."
    branches = s.fork(chains)
    for seed, branch in enumerate(branches):
        branch += gen("thought", max_tokens=96, temperature=0.8, seed=seed, stop="\n\n")
        branch += "\nThe answer is"
        branch += gen("answer", regex=" [0-9]{1,4}", max_tokens=8, temperature=0)
    votes = Counter([(await branch["answer"]).strip() for branch in branches])
    return votes.most_common(1)[0]


if __name__ == "__main__":
    answer, count = self_consistency.run(" ".join(sys.argv[1:]) or QUESTION)
    print(f"{answer} ({count} of 8 chains)")
