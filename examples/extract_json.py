"""Extracts objects of a dataclass from texts, by its JSON schema.   radixrt run examples/extract_json.py"""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from radixrt import Branch, assistant, gen, program, system, user

MAILS = [
    "Hi, order 4711 came with a broken lamp. I want my money back. Mia",
    "Where is my parcel? Number 1234, it should have been here on Monday!!",
    "Just to say thanks, the chair is lovely. Order was 99.",
]
Short = Annotated[str, Meta(max_length=40)]


@dataclass
class Ticket:
    order: Annotated[int, Meta(ge=0, le=99999)]
    kind: Literal["refund", "delivery", "praise", "other"]
    urgent: bool
    summary: Short


@program
async def extract_json(s: Branch, mails: list[str]) -> list[Ticket | None]:
    s += system("Read a customer's mail and fill in the ticket, as JSON.")
    branches = s.fork(len(mails))
    for mail, branch in zip(mails, branches, strict=True):
        branch += user(mail)
        branch += assistant(gen("ticket", schema=Ticket, max_tokens=160, temperature=0))
    values = [await branch.value("ticket") for branch in branches]
    return [value.parse() if value.finish == "stop" else None for value in values]  # None: max_tokens was reached


if __name__ == "__main__":
    for ticket in extract_json.run(MAILS):
        print(ticket or "no ticket: max_tokens was too few")
