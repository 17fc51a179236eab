"""`gen(regex=..., schema=...)`: what a program says is what a grammar allows, over every transport."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass

import msgspec
import pydantic
import pytest

from radixrt import Branch, Grammar, ProgramError, Sampling, ServerError, assistant, gen, program, user
from radixrt.client import Client
from radixrt.lang.schema import parse
from tests.checkpoints import make_model
from tests.frontend.conftest import serving

SHORT = Sampling(max_tokens=200, temperature=0.0)
CARD = {"type": "object", "properties": {"n": {"enum": [1, 22]}, "on": {"type": "boolean"}}, "required": ["n", "on"]}


class Struct(msgspec.Struct):
    n: bool
    deep: list[bool]


class Model(pydantic.BaseModel):
    n: bool
    deep: tuple[bool, bool]


@dataclass
class Data:
    n: bool | None


@dataclass
class Holder:
    one: Model


# ---------------------------------------------------------------- what is asked for


def test_what_gen_makes_of_it():
    assert gen("x", regex="[ab]").sampling.grammar == Grammar("regex", "[ab]")
    assert json.loads(gen("x", schema=CARD).sampling.grammar.text) == CARD
    assert gen("x", schema='{"enum": [1]}').sampling.grammar == Grammar("json_schema", '{"enum": [1]}')
    assert gen("x", schema={}).sampling.grammar == Grammar("json_schema", "{}")
    assert gen("x", grammar=Grammar("ebnf", 'root ::= "a"')).sampling.grammar.kind == "ebnf"
    for kind in (Struct, Model, Data, list[int], list[Model], Holder, pydantic.TypeAdapter(dict[str, Model])):
        text = gen("x", SHORT, schema=kind, max_tokens=3).sampling.grammar.text
        assert "type" in text or "$ref" in text
    assert gen("x", SHORT, schema=Model).sampling.max_tokens == 200
    assert gen("x").sampling.grammar is None


@pytest.mark.parametrize(
    "wrong, error",
    [
        ({"regex": "a", "schema": {}}, ValueError),
        ({"regex": "a", "grammar": Grammar("json")}, ValueError),
        ({"schema": "{"}, ValueError),
        ({"schema": object}, TypeError),
        ({"schema": [1]}, TypeError),
    ],
)
def test_what_is_no_grammar(wrong, error):
    with pytest.raises(error):
        gen("x", **wrong)


def test_parsing():
    assert parse('{"n": 1}', {}) == {"n": 1}
    assert parse('{"n": true, "deep": []}', Struct) == Struct(True, [])
    assert parse('{"n": true, "deep": [true, false]}', Model) == Model(n=True, deep=(True, False))
    assert parse("[1, 2]", list[int]) == [1, 2]
    found = Model(n=True, deep=(True, False))
    text = found.model_dump_json()
    assert parse(f"[{text}]", list[Model]) == [found] and parse(f'{{"one": {text}}}', Holder) == Holder(found)
    assert parse(f'{{"a": {text}}}', pydantic.TypeAdapter(dict[str, Model])) == {"a": found}
    for kind in ({}, Struct, Model, list[Model], Holder):
        with pytest.raises(ValueError):
            parse('{"n": tr', kind)


# ---------------------------------------------------------------- programs


@program
async def card(s: Branch, kind: object, sampling: Sampling) -> tuple[str, object]:
    s += user("A card.")
    s += assistant("It: ", gen("card", sampling, schema=kind), " no. ", gen("number", SHORT, regex="[1-9][0-9]{2}!"))
    return (await s["card"]) + (await s["number"]), await s.parse("card")


def check(client: Client) -> None:
    # A model that has learned nothing would write white space without end.
    blank = {i: -100.0 for i in range(512) if not client.detokenize([i]).strip()}
    calm = Sampling(max_tokens=200, temperature=0.0, logit_bias=blank)
    text, value = card.run(client, CARD, calm)
    assert re.search(r"\}[1-9][0-9]{2}!$", text) and value["n"] in (1, 22) and isinstance(value["on"], bool)
    assert isinstance(card.run(client, Model, calm)[1], Model)
    done = client.generate(
        "Now: ", Sampling(max_tokens=50, temperature=1.0, seed=1, grammar=Grammar("regex", "é{3}|🙂"))
    )
    assert done.text in ("ééé", "🙂") and done.finish == "stop"
    streamed = client.stream(
        "Now: ", Sampling(max_tokens=50, temperature=1.0, seed=1, grammar=Grammar("regex", "é{3}|🙂"))
    )
    assert "".join(delta.text for delta in streamed) == done.text
    ids = client.generate([5, 6, 7], Sampling(max_tokens=50, grammar=Grammar("ebnf", 'root ::= "ab" | "cd"')))
    assert ids.text in ("ab", "cd")


def test_over_zmq(client):
    check(client)


def test_over_http(folder):
    with serving(folder) as front, Client(front.url) as client:
        check(client)


def test_with_a_model_in_this_process(folder, tmp_path):
    make_model(tmp_path, "llama", num_hidden_layers=1)
    for path in folder.glob("*token*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with Client(f"local:{tmp_path}") as client:
        check(client)


def test_a_plain_program(client):
    @program
    def plain(s) -> object:
        s += "Perhaps: "
        s += gen("a", SHORT, schema=Struct | None)
        return s.parse("a")

    assert isinstance(plain.run(client), Struct | None)


def test_branches_with_grammars_of_their_own(client):
    @program
    async def many(s: Branch) -> list[str]:
        s += "Digits: "
        branches = s.fork(6)
        for i, branch in enumerate(branches):
            branch += gen("x", SHORT, regex=f"{i}[ab]{{{i}}}") if i % 2 else gen("x", max_tokens=5, ignore_eos=True)
        return [await branch["x"] for branch in branches]

    found = many.run(client)
    assert all(re.fullmatch(f"{i}[ab]{{{i}}}", text) for i, text in enumerate(found) if i % 2)
    assert len(found[0]) >= 5


def test_an_error_names_the_field_and_the_line(client):
    @program
    async def broken(s: Branch) -> str:
        s += gen("x", SHORT, schema={"type": "integr"})
        return await s["x"]

    for _ in range(2):
        with pytest.raises(ProgramError, match="#/type must be of object") as caught:
            broken.run(client)
        problem = caught.value.problem
        assert isinstance(problem, ServerError) and (problem.code, problem.field) == (400, "grammar")
    assert "test_grammars.py" in str(caught.value)
    with pytest.raises(ServerError, match="regular expression"):
        client.generate([5, 6], Sampling(grammar=Grammar("regex", "(")))


def test_json_that_was_cut_off(client):
    @program
    async def cut(s: Branch) -> object:
        s += "A card: "
        s += gen("x", schema=CARD, max_tokens=3)
        assert (await s.value("x")).finish == "length"
        return await s.parse("x")

    with pytest.raises(ValueError):
        cut.run(client)


def test_many_at_once(client):
    async def one(number: int) -> str:
        grammar = Grammar("regex", f"{number}:[a-f]{{4}}") if number % 3 else None
        sampling = Sampling(max_tokens=40, temperature=1.0, seed=number, grammar=grammar, ignore_eos=grammar is None)
        return (await client.aio.generate(f"Number {number}", sampling)).text

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(one(n) for n in range(24)))

    for number, text in enumerate(client.run(all_of_them())):
        assert re.fullmatch(f"{number}:[a-f]{{4}}", text) if number % 3 else text
