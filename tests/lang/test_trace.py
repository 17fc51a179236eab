"""Traces: what they know, and how they show it."""

from __future__ import annotations

import html.parser
import time

import pytest

from radixrt import Branch, ProgramError, Sampling, SyncBranch, assistant, gen, program, select, trace, user

SHORT = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)


def nap(seconds: float) -> str:
    time.sleep(seconds)
    return 'rested <b>well</b> "indeed" onclick="x"'


@program
async def traced(s: Branch) -> list[str]:
    s += user("A <question> & more")
    s += assistant("So: ", gen("plan", SHORT))
    branches = s.fork(2)
    for branch in branches:
        branch += user("Go on")
        branch += assistant(gen("view", SHORT, max_tokens=4))
    await branches[0].tool(nap, 0.05)
    s += user("Well?")
    s += assistant(select("verdict", ["yes", "no"]))
    return [await s["plan"], await branches[1]["view"]]


def test_what_a_trace_knows(client):
    plain = traced.run(client)
    with trace() as t:
        assert traced.run(client) == plain, "the same with a trace as without"
    traced.run(client)
    (run,) = t.runs
    assert run.program == "traced" and 0.05 <= run.seconds < 60
    steps = run.by_branch()
    assert list(steps) == ["", "0", "1"]
    kinds = [(step.kind, step.name) for step in steps[""]]
    assert kinds[:4] == [("text", "user"), ("text", "assistant"), ("gen", "plan"), ("fork", "2")]
    assert kinds[4:] == [("text", "user"), ("select", "verdict")]
    plan = steps[""][2]
    assert (plan.said, plan.finish, plan.usage.completion_tokens) == (plain[0], "length", 8)
    assert plan.usage.cached_tokens == plan.usage.prompt_tokens - 1, "the first run had computed it"
    assert plan.began <= plan.first < plan.ended and "test_trace.py" in str(plan.site)
    (rest,) = [step for step in steps["0"] if step.kind == "tool"]
    assert rest.name == "nap" and 0.05 <= rest.seconds < run.seconds and rest.said.startswith("rested")
    assert run.usage().completion_tokens == 8 + 4 + 4
    assert run.usage().prompt_tokens == sum(step.usage.prompt_tokens for step in run.steps)


def test_as_text(client):
    with trace() as t:
        traced.run(client)
    lines = t.text().splitlines()
    assert lines[0].startswith("traced: ") and "4 requests" in lines[0] and " 16 out" in lines[0]
    places = [next(i for i, line in enumerate(lines) if part in line) for part in ("gen plan", "fork 2", "[0]", "[1]")]
    assert places == sorted(places)
    tool = next(line for line in lines if "tool nap" in line)
    assert tool.startswith(" " * 6) and " ms" in tool and lines.index(tool) < places[3]
    assert "first " in lines[places[0]] and "cached" in lines[places[0]] and lines[places[0]].startswith("  gen")


class Page(html.parser.HTMLParser):
    """Tags that are open at the end, all text, and what would be loaded."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.loads: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        assert {name for name, _ in attrs} <= {
            "class",
            "style",
            "title",
            "colspan",
            "lang",
            "charset",
            "name",
            "content",
        }
        self.loads += [value for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_as_a_page(client):
    with trace() as t:
        traced.run(client)
    text = t.html()
    page = Page(text)
    assert page.open == [] and page.loads == [] and "url(" not in text and "http" not in text
    assert not page.tags & {"b", "question", "script", "link", "img", "iframe"}
    assert "A <question> & more" in page.text and "rested <b>well</b>" in page.text
    assert page.text.count("gen view") == 2 and "branch 1" in page.text and text.count('class="wait"') == 1 + 3


def test_what_went_wrong_is_shown(slow):
    async def wrong(s: Branch):
        s += "start"
        a, b, c = s.fork(3)
        a += gen("x", max_tokens=90_000, ignore_eos=True)
        with b.budget(tokens=5):
            b += gen("y", max_tokens=90_000, ignore_eos=True)
        c += gen("z", SHORT, top_p=7.0)
        for branch, name in ((b, "y"), (c, "z")):
            with pytest.raises(ProgramError):
                await branch[name]
        await a.cancel()

    with trace() as t:
        program(wrong).run(slow)
    found = {step.name: step.finish for step in t.runs[0].steps if step.asks}
    assert found["x"] == "cancelled" and found["y"] == "budget spent" and found["z"].startswith("error: top_p")
    cut = next(step for step in t.runs[0].steps if step.name == "y")
    assert cut.ended - cut.first > 0.012, "the first of five tokens, at 5 ms each"
    assert "cancelled" in t.text() and t.html().count('class="bad"') == 3
    Page(t.html())


def test_plain_programs_and_several_runs(client):
    @program
    def plain(s: SyncBranch, text: str) -> str:
        s += text
        s += gen("x", SHORT)
        return s["x"]

    with trace() as t:
        plain.run(client, "one")
        plain.run(client, "two")
        with pytest.raises(ProgramError):
            plain.run(client, "")
    assert [run.program for run in t.runs] == ["plain"] * 3 and all(run.ended for run in t.runs)
    assert t.text().count("plain: ") == 3


def test_a_tree_as_deep_as_one_likes(client):
    @program
    async def deep(s: Branch) -> None:
        s += "root"
        for _ in range(1200):
            (s,) = s.fork(1)
        s += gen("x", SHORT)
        await s.wait()

    with trace() as t:
        deep.run(client)
    assert "gen x" in t.text() and "gen x" in t.html()
