"""Writes docs/compatibility.md (`make compatibility`). Each row is of a test's parameters, or of what a published chat
template writes; tests/test_compatibility.py compares the page."""

from __future__ import annotations

import re
import textwrap
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from radixrt.formats.output import probe_text
from radixrt.formats.parsing import (
    CallStart,
    Function,
    Harmony,
    ReasoningFormat,
    ToolFormat,
    reasoning_format,
    tool_format,
)
from radixrt.formats.parsing.detect import REASONING_FORMATS, TOOL_FORMATS
from radixrt.frontend.generate.request import thinking_args
from radixrt.messages import ChatPrompt
from radixrt.tokens.chat import ChatTemplates
from tests.agents import test_agents
from tests.frontend import test_call_formats, test_clients, test_frameworks, test_harmony, test_parsing, test_request
from tests.histories import (
    APIS,
    BASH,
    HISTORIES,
    MOVES,
    REFUSED,
    SPECIAL_TOKENS,
    TEMPLATES_REFUSE,
    Message,
    call,
    result,
    said,
)

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
TEMPLATES = ROOT.parent / "shared" / "data" / "chat_templates"
"""The published templates; those of the fixture `shared_data`."""
TEMPLATES_TITLE = "## Chat templates"


def code(text: str) -> str:
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{text.replace('|', chr(92) + '|')}{fence}" if text else ""


def codes(texts: Iterable[str]) -> str:
    return ", ".join(map(code, texts))


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [[*head], *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join(f"|{'|'.join(line)}|\n" if i == 1 else f"| {' | '.join(line)} |\n" for i, line in enumerate(lines))


def paragraph(text: str) -> str:
    return textwrap.fill(text, 130, break_long_words=False, break_on_hyphens=False) + "\n"


# ---------------------------------------------------------------- clients, routes, histories


def clients() -> str:
    agents = re.findall(r"(@?[\w./-]+)@(\d[\w.]+)", re.search(r"^AGENTS \?= (.*)", read("Makefile"), re.M)[1])
    extra = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]["test"]
    versions = dict(agents) | dict(re.match(r"([\w-]+)(?:\[.*?\])?([^;]*)", one).groups() for one in extra)
    task = test_agents.test_an_agent_does_its_task_and_each_turn_hits_all_but_its_new_tokens.__name__
    served = f"{_told_by(task, 'test_an_agent')}, with the templates of {', '.join(test_agents.FORMATS)}"
    rows = [(kind.package, code(kind.route), served, test_agents) for kind in test_agents.AGENTS]
    for sdk, routes in test_clients.SDKS.items():
        rows.append((sdk, codes(routes), codes(method for method, _ in routes.values()), test_clients))
    for package, routes in test_frameworks.FRAMEWORKS.items():
        prefix = "test_" + re.match(r"[a-z]+(-ai)?", package)[0].replace("-", "_")
        done = (_told_by(name, prefix) for name in vars(test_frameworks) if name.startswith(prefix))
        rows.append((package, codes(routes), ", ".join(done), test_frameworks))
    told = ((name, versions[name], route, f"{what} ({code(_file(test))})") for name, route, what, test in rows)
    return table(("client", "version", "route", "what is tested"), told)


def read(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def _told_by(test: str, prefix: str) -> str:
    """What a test says by its name."""
    return test.removeprefix(prefix).replace("_", " ").strip()


def _file(module: ModuleType) -> str:
    return Path(module.__file__ or "").relative_to(ROOT).as_posix()


def fields() -> str:
    shared = codes([*test_request.SHARED, *test_request.MORE, "priority"])
    refused: dict[str, list[str]] = defaultdict(list)
    for route, (schema, _) in test_clients.SCHEMAS.items():
        refused[codes(sorted(schema.unserved))].append(route)
    taken = ((code(route), codes(values)) for route, values in test_frameworks.OPTIONS.items())
    return "\n".join(
        (
            paragraph(f"{codes(test_request.BODIES)} all take {shared}, whose names are vLLM's."),
            table(("route", "refused"), ((codes(routes), names) for names, routes in refused.items())),
            table(("route", "taken, by the names that pydantic-ai has for them"), taken),
        )
    )


def histories() -> str:
    exceptions = [kind for kind in HISTORIES if kind in REFUSED or _inexpressible(kind)]
    rows = [(kind, *(_told(kind, api) for api in APIS)) for kind in exceptions]
    served = [kind for kind in HISTORIES if kind not in exceptions]
    head = ("history", *(f"{name} {code(api.path)}" for name, api in APIS.items()))
    return paragraph(f"Served by all, with every template: {'; '.join(served)}.") + "\n" + table(head, rows)


def _inexpressible(kind: str) -> list[str]:
    return [name for name, api in APIS.items() if api.body(HISTORIES[kind]) is None]


def _told(kind: str, api: str) -> str:
    if api in _inexpressible(kind):
        return "no such form"
    if api in REFUSED.get(kind, ()):
        return "refused"
    return "refused if the template does" if kind in TEMPLATES_REFUSE else "served"


# ---------------------------------------------------------------- formats


def calls() -> str:
    """Each format with a call of its tests."""
    samples: dict[str, list[str]] = defaultdict(list)
    for kind, form in test_parsing.FORMATS.items():
        samples[names_of(form)].append(_sample(kind))
    samples[names_of(Harmony())].append(test_harmony.CALL)
    rows = ((names, " or ".join(code(one.replace("\n", "↵")) for one in some)) for names, some in samples.items())
    return table(("`--tool-call-parser`", "a call"), rows)


def _sample(kind: str) -> str:
    if kind in test_call_formats.SAID:
        return test_call_formats.said(kind, 1).strip()
    for form, text, (first, *rest) in test_parsing.FOUND:
        if form == kind and isinstance(first, CallStart) and len(rest) <= 2:
            return text.removesuffix(getattr(rest[-1], "text", "")) if len(rest) == 2 else text
    raise LookupError(kind)


def names_of(form: ToolFormat) -> str:
    """The names of a format, by the grammar of its calls; of one of its kind, if it has none."""
    made = {name: make() for name, make in TOOL_FORMATS.items()}
    alike = [name for name, one in made.items() if type(one) is type(form)]
    one_call = [Function("f", True)], True
    return codes([name for name in alike if made[name].forced(*one_call) == form.forced(*one_call)] or alike)


def thoughts() -> str:
    marks: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, form in REASONING_FORMATS.items():
        marks[form.open + form.title, form.close].append(name)
    rows = [(codes(names), f"{code(opened)} … {code(closed)}") for (opened, closed), names in marks.items()]
    return table(("`--reasoning-parser`", "thoughts"), rows)


# ---------------------------------------------------------------- chat templates


TASK, ANSWER, NEXT = said("user", "task1"), said("assistant", "answer1"), said("user", "next1")
COLUMNS = ("several instructions", "a later instruction", "tools", "calls", "other arguments", "thoughts")
COLUMNS += ("format of calls", "format of thoughts", "what changes in the next turn")


def templates(folder: Path) -> str:
    """Those that are served in the same way are in one row."""
    rows: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for file in sorted(folder.glob("*.jinja")):
        rows[(*served(file.read_text("utf-8")), MOVES.get(file.stem, ""))].append(file.stem)
    return table(("template", *COLUMNS), ((", ".join(names), *cells) for cells, names in rows.items()))


def served(text: str) -> tuple[str, ...]:
    """How a template is served, by the columns, as its prompts show."""
    source = ChatTemplates({"default": text}, SPECIAL_TOKENS)

    def prompt(*messages: Message, tools: list[Any] | None = None) -> str:
        return source.render(ChatPrompt(list(messages), tools, template_args=thinking_args(True)))

    one, two, both = said("system", "first1"), said("system", "second1"), said("system", "first1\n\nsecond1")
    several = "as they are"
    if prompt(both, TASK) == prompt(said("user", "first1\n\nsecond1\n\ntask1")):
        several = "in the user's turn"
    elif prompt(one, two, TASK) == prompt(both, TASK):
        several = "merged"
    later = "a reminder" if "<system-reminder>" in prompt(TASK, ANSWER, one, NEXT) else "at its place"
    tools = "told" if "You may call these functions:" in prompt(TASK, tools=[BASH]) else "shown"
    calls = "the template's" if "tool_calls" in text else "as text"
    cut = [call(arguments=arguments) for arguments in ('{"command": "l', {"arguments": '{"command": "l'})]
    wrapped = len({prompt(TASK, message, result("result1"), tools=[BASH]) for message in cut}) == 1
    within = prompt(TASK, call() | {"reasoning_content": "thought1"}, result("result1"), tools=[BASH])
    after = prompt(TASK, ANSWER | {"reasoning_content": "thought1"}, NEXT)
    thinks = ["thought1" in one for one in (within, after)]
    kept = {(True, True): "kept", (True, False): "kept until the next question", (False, True): "kept in answers"}
    rendered = probe_text(SimpleNamespace(apply_chat=source.render))
    form, thought = tool_format("auto", rendered), reasoning_format("auto", rendered)
    marks = thought.open + thought.title if isinstance(thought, ReasoningFormat) else "gpt-oss" if thought else ""
    return (
        several, later, tools, calls,
        "in an object" if wrapped else "as they are",
        kept.get(tuple(thinks), "dropped"),
        names_of(form).partition(",")[0] if form else "none",
        code(marks),
    )  # fmt: skip


# ---------------------------------------------------------------- the page


def page(folder: Path | None) -> str:
    """The page; without published templates, their table is the one that the page has."""
    told = templates(folder) if folder and folder.is_dir() else templates_of(PAGE.read_text("utf-8"))
    return INTRODUCTION.format(clients=clients(), fields=fields(), histories=histories(), calls=calls(),
                               thoughts=thoughts()) + TEMPLATES_INTRODUCTION + told  # fmt: skip


def templates_of(text: str) -> str:
    """The table of the templates in a page."""
    return "| template" + text.partition(TEMPLATES_TITLE)[2].partition("| template")[2]


INTRODUCTION = """# What is compatible

`make compatibility` writes this page from the tables that the tests use, and `tests/test_compatibility.py` compares it.

## Clients

`make test-agents` runs the agents, unmodified; `make test` the others.

{clients}
## Request fields

{fields}
## Histories

What agents send that chat templates do not expect. *Served*: every text is in the prompt, and the next turn's prompt
begins with its tokens. *Refused*: an error (400) that names the message.
`tests/frontend/test_histories_by_api.py` tests each by each API with every template.

{histories}
## Formats of calls and thoughts

They are found by what the chat template writes, or set by name. ↵ is a line feed.

{calls}
{thoughts}
"""
TEMPLATES_INTRODUCTION = f"""{TEMPLATES_TITLE}

How published ones are served, by what they write when thinking is on:

- *merged*: several instructions become one; *a reminder*: a later one is in the user's turn, in `<system-reminder>`;
- *told*: the template does not show tools, so the instructions do; *as text*: it does not write calls, so they are
  text of the answer;
- *other arguments* than a JSON object: some templates take nothing else, and get an object whose only value they are;
- *thoughts* that a template drops are kept with `--keep-thinking`;
- *none*: calls are content;
- where nothing *changes in the next turn*, its prompt begins with the one before.

"""


def main() -> None:
    PAGE.write_text(page(TEMPLATES), "utf-8")


if __name__ == "__main__":
    main()
