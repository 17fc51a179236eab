"""Reason and act, with a tool; each turn extends the prompt of the last.   radixrt run examples/react_agent.py"""

from radixrt import SyncBranch, gen, program

FACTS = {"capital": "Tokyo is the capital of Japan.", "population": "14 million people live in Tokyo."}


def search(query: str) -> str:
    return next((fact for word, fact in FACTS.items() if word in query), "nothing was found")


@program
def react(s: SyncBranch, question: str, turns: int = 3) -> str:
    s += "Answer by Thought, Action and Observation.\n\n"
    s += f"Question: {question}\n"
    for turn in range(1, turns + 1):
        s += f"Thought {turn}:"
        s += gen("thought", max_tokens=32, temperature=0, stop="\n")
        s += f"\nAction {turn}: search["
        s += gen("query", max_tokens=16, temperature=0, stop=("]", "\n"))
        s += f"]\nObservation {turn}: {search(s['query'])}\n"
    s += "Answer:"
    s += gen("answer", max_tokens=24, temperature=0, stop="\n")
    return s["answer"].strip()


if __name__ == "__main__":
    print(react.run("How many people live in the capital of Japan?"))
