"""Many questions about one document, which is computed once.   radixrt run examples/shared_document.py [FILE]"""

import sys
from pathlib import Path

from radixrt import Branch, assistant, gen, program, select, system, user

DOCUMENT = (
    """House rules of the Harbour Library. The library opens at 9 and closes at 20; on Sundays it is shut.
Readers may borrow six books for four weeks, and renew them twice unless somebody else waits. A book that is late costs
20 cents a day, at most 5 euros. Laptops are welcome on the first floor; the second floor is for silence. Rooms for
groups are booked at the desk, for two hours at most. Dogs wait outside, but for those who guide. """
    * 3
)
QUESTIONS = [
    "How long may I keep a book?",
    "What does a late book cost?",
    "May I bring my dog?",
    "Where may I use a laptop?",
    "Who built the library?",
]


@program
async def shared_document(s: Branch, document: str, questions: list[str]) -> list[tuple[str, str, float]]:
    s += system(f"Answer from this document alone:\n\n{document}")
    branches = s.fork(len(questions))
    for question, branch in zip(questions, branches, strict=True):
        branch += user(question)
        branch += assistant(
            "In the document: ", select("known", ["yes", "no"]), ".", gen("answer", max_tokens=40, temperature=0)
        )
    answers = []
    for branch in branches:
        value = await branch.value("answer")
        cached = value.usage.cached_tokens / value.usage.prompt_tokens
        answers.append((await branch["known"], value.text.strip(), cached))
    return answers


if __name__ == "__main__":
    text = Path(sys.argv[1]).read_text() if len(sys.argv) > 1 else DOCUMENT
    for question, (known, answer, cached) in zip(QUESTIONS, shared_document.run(text, QUESTIONS), strict=True):
        print(f"{question} [{known}, {cached:.0%} cached] {answer}")
