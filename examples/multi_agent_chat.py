"""Agents that talk, each with its own branch of the conversation.   radixrt run examples/multi_agent_chat.py"""

from radixrt import Branch, assistant, gen, program, select, system, user

AGENTS = {
    "Ada": "You are Ada, an engineer. You want the simplest thing that works.",
    "Bo": "You are Bo, who runs the machines at night. You want what cannot fail.",
    "Cem": "You are Cem, who pays. You want to know what it costs.",
}
TOPIC = "Should the new service keep its data in memory or on disk?"


@program
async def multi_agent_chat(s: Branch, topic: str, rounds: int = 2) -> tuple[list[str], str]:
    s += system("Several colleagues talk. Each says one or two sentences at a time.")
    views = dict(zip(AGENTS, s.fork(len(AGENTS)), strict=True))
    for name, view in views.items():
        view += user(f"{AGENTS[name]} The topic: {topic}")
    spoken: list[str] = []
    heard = dict.fromkeys(AGENTS, 0)
    for _ in range(rounds):
        for name, view in views.items():
            news = "\n".join(spoken[heard[name] :])  # only what is new to this agent
            view += user(f"{news}\n{name}, it is your turn.".lstrip())
            view += assistant(gen("said", max_tokens=48, temperature=0.7, seed=len(spoken), stop="\n"))
            spoken.append(f"{name}: {await view['said']}")
            heard[name] = len(spoken)  # its own message is in its view already
    s += user("\n".join([topic, *spoken, "What do they agree on?"]))
    s += assistant(select("agreed", ["memory", "disk", "nothing"]))
    return spoken, await s["agreed"]


if __name__ == "__main__":
    conversation, agreed = multi_agent_chat.run(TOPIC)
    print(*conversation, f"agreed on: {agreed}", sep="\n")
