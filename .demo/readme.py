from radixrt import Branch, program, user


def calculator(expression: str) -> int:
    """Calculates two numbers with +, - or *."""
    a, operator, b = expression.split()
    return {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[operator]


@program
async def solve(s: Branch, question: str) -> str:
    s += user(question)
    answer = await s.run_tools("answer", [calculator], max_rounds=4, max_tokens=96, temperature=0)
    return answer.content


print(solve.run("What is 21 * 7?"))
