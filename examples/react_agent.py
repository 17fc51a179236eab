"""ReAct: reasoning and tool calls in turns; each extends the prompt before it.   radixrt run examples/react_agent.py"""

import ast
import operator

from radixrt import Branch, ProgramError, gen, program, select

FACTS = {
    "japan": "Tokyo is the capital of Japan; 14 million people live there.",
    "france": "Paris is the capital of France; 2 million people live there.",
}
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
PROMPT = """Answer by Thought, Action and Observation. Actions: search[words] and calculate[expression].

Question: How many more people live in the capital of Japan than in that of France?
"""


def search(words: str) -> str:
    found = [fact for place, fact in FACTS.items() if place in words.lower()]
    return " ".join(found) or "nothing was found"


def calculate(expression: str) -> str:
    def value(node: ast.expr) -> float:
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        return float(ast.literal_eval(node))

    return f"{value(ast.parse(expression.strip(), mode='eval').body):g}"


TOOLS = {"search": search, "calculate": calculate}


@program
async def react_agent(s: Branch, turns: int = 4) -> str:
    s += PROMPT
    for turn in range(1, turns + 1):
        s += f"Thought {turn}:"
        s += gen("thought", max_tokens=32, temperature=0, stop="\n")
        s += f"\nAction {turn}: "
        s += select("action", ["search", "calculate", "finish"])
        if await s["action"] == "finish":
            break
        s += "["
        s += gen("input", max_tokens=16, temperature=0, stop=("]", "\n"))
        try:
            seen = await s.tool(TOOLS[await s["action"]], await s["input"], timeout=5)
        except ProgramError as error:  # the tool has failed, for example on an invalid expression: tell the model
            seen = f"error: {type(error.problem).__name__}"
        s += f"]\nObservation {turn}: {seen}\n"
    s += "\nAnswer:"
    s += gen("answer", max_tokens=24, temperature=0, stop="\n")
    return await s["answer"]


if __name__ == "__main__":
    print("answer:", react_agent.run().strip())
