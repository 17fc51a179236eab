"""Several attempts at once, each checked by running it; the first that passes wins, and the others are cancelled.
radixrt run examples/best_of_n.py"""

import ast

from radixrt import Branch, NoWinner, gen, program, race

TASK = '''def middle(a, b, c):
    """Return the one of three numbers that is neither the smallest nor the largest."""
    return'''
EXAMPLES = [((1, 2, 3), 2), ((9, 4, 7), 7), ((5, 5, 1), 5)]
ALLOWED = set(
    "Expression Lambda arguments arg Call Name Load Constant List Tuple Subscript BinOp Add Sub UnaryOp".split()
)
ALLOWED |= set("BinOp Add Sub UnaryOp USub IfExp Compare Lt LtE Gt GtE BoolOp And Or".split())


def verify(expression: str) -> bool:
    """Whether it is an expression of allowed node types that is right for all examples."""
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        if any(type(node).__name__ not in ALLOWED for node in ast.walk(tree)):
            return False
        attempt = eval(compile(tree, "attempt", "eval"), {"__builtins__": {}, "sorted": sorted, "min": min, "max": max})
        return all(attempt(*given) == right for given, right in EXAMPLES)
    except Exception:  # it does not even run
        return False


async def attempt(branch: Branch) -> tuple[str, bool]:
    branch += gen("code", max_tokens=48, temperature=1.0, seed=int(branch.path), stop="\n")
    code = await branch["code"]
    return code, await branch.tool(verify, "lambda a, b, c:" + code, timeout=2)


@program
async def best_of_n(s: Branch, attempts: int = 8) -> str:
    s += TASK
    with s.budget(tokens=600, seconds=60):
        branches = s.fork(attempts)
    try:
        winner, (code, _) = await race(branches, attempt, until=lambda found: found[1])
    except NoWinner as error:
        return f"none of {attempts} attempts was right, {len(error.results)} were checked"
    return f"attempt {winner.path}: {code.strip()}"


if __name__ == "__main__":
    print(best_of_n.run())
