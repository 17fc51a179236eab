"""Several views of a question from one plan, and a verdict.   radixrt run examples/debate.py "Is tea better?" """

import sys

from radixrt import Branch, assistant, gen, program, select, system, user


@program
async def debate(s: Branch, question: str, views: int = 3) -> str:
    s += system("You are terse.")
    s += user(question)
    s += assistant(gen("plan", max_tokens=48))
    branches = s.fork(views)
    for number, branch in enumerate(branches, 1):
        branch += user(f"Argue for view {number}.")
        branch += assistant(gen("view", max_tokens=32, temperature=0.8, seed=number))
    s += user("\n".join([await branch["view"] for branch in branches]), "\nWhich is right?")
    s += assistant("The answer is ", select("verdict", ["yes", "no", "unclear"]))
    return await s["verdict"]


if __name__ == "__main__":
    print(debate.run(sys.argv[1] if len(sys.argv) > 1 else "Is the fox quick?"))
