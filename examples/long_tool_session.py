"""A chat of many turns, with tool calls by a JSON schema: each turn reuses all that earlier turns have computed.
radixrt run examples/long_tool_session.py"""

import asyncio
import sys
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from radixrt import Branch, assistant, gen, program, system, user

STOCK = {"bolts": 120, "nuts": 80, "screws": 40}
ORDERS = ["Take 20 bolts.", "We got 15 nuts.", "How many screws are there?", "Take 5 screws.", "Count everything."]


@dataclass
class Call:
    tool: Literal["look", "add", "take"]
    item: Literal["bolts", "nuts", "screws"]
    amount: Annotated[int, Meta(ge=0, le=99)]


async def warehouse(stock: dict[str, int], call: Call) -> dict[str, int]:
    """A tool, which takes some time."""
    await asyncio.sleep(0.002)
    stock[call.item] += {"look": 0, "add": call.amount, "take": -call.amount}[call.tool]
    return {call.item: stock[call.item]}


@program
async def long_tool_session(s: Branch, turns: int = 10) -> tuple[dict[str, int], list[float]]:
    stock = dict(STOCK)
    s += system("You keep the books of a warehouse. Each order becomes one call: look, add or take; item; amount.")
    rates = []
    for turn in range(turns):
        s += user(ORDERS[turn % len(ORDERS)])
        s += assistant(gen("call", schema=Call, max_tokens=96, temperature=0))
        call = await s.value("call")
        if call.finish == "stop":
            await s.tool(warehouse, stock, call.parse(), append="tool", timeout=5)
        s += assistant(gen("reply", max_tokens=24, temperature=0))
        usage = (await s.value("reply")).usage
        rates.append(usage.cached_tokens / usage.prompt_tokens)
    return stock, rates


if __name__ == "__main__":
    counted, hits = long_tool_session.run(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
    print("stock:", counted)
    print("cached, by turn:", *(f"{hit:.0%}" for hit in hits))
