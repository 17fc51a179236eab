"""A judge that splits its criteria over branches and merges them.   radixrt run examples/branch_solve_merge.py"""

from radixrt import Branch, assistant, gen, program, select, system, user

ESSAY = """Cities should plant more trees. Trees cool streets in summer, hold rain, and make people stay outside longer.
They cost little beside roads. Some say that roots break pavements, but there are species whose roots go down."""
CRITERIA = ["clarity of the argument", "evidence", "treatment of objections", "style"]
GRADES = ["1", "2", "3", "4", "5"]


@program
async def branch_solve_merge(s: Branch, essay: str) -> tuple[dict[str, str], str]:
    s += system("You judge essays. You are strict and fair.")
    s += user(f"The essay:\n\n{essay}")
    judges = dict(zip(CRITERIA, s.fork(len(CRITERIA)), strict=True))
    for criterion, judge in judges.items():
        judge += user(f"Judge only this: {criterion}. Give a reason, then a grade from 1 to 5.")
        judge += assistant(gen("reason", max_tokens=64, temperature=0), "\nGrade: ", select("grade", GRADES))
    found = "\n".join([f"{name}: {await j['reason']} ({await j['grade']} of 5)" for name, j in judges.items()])
    s += user(f"Your findings:\n{found}\nMerge them into one verdict.")
    s += assistant(gen("verdict", max_tokens=64, temperature=0))
    return {name: await judge["grade"] for name, judge in judges.items()}, await s["verdict"]


if __name__ == "__main__":
    grades, verdict = branch_solve_merge.run(ESSAY)
    print(*(f"{name}: {grade}" for name, grade in grades.items()), verdict, sep="\n")
