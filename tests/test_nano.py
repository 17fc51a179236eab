"""nano, the model that comes along: found by its name, and what is served of it makes sense.

The questions are of the kinds that it was trained on, and easy, so that the answers do not hang on a rounding.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from openai import OpenAI
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from radixrt import cli
from radixrt.client import Client
from radixrt.client.local import LocalStack, local_stack
from radixrt.config import NANO, FrontendConfig, RouterConfig, StackConfig, WorkerConfig, resolve
from radixrt.demo import program as demo
from radixrt.demo import world
from radixrt.demo.program import calculator
from radixrt.demo.tour import Marks, run_chat
from radixrt.frontend.server import FrontendThread
from radixrt.lang import Branch, assistant, gen, program, race, select, system, user
from radixrt.messages import Sampling
from radixrt.process.ports import free_tcp_address

GREEDY = Sampling(max_tokens=64, temperature=0)
NOTES = (
    "Here are the notes.\nThe access code of the blue harbor is 4817. The owner of the old mill is Tom Bren. "
    "Mia walked to the red tower and sat down. The access code of the red tower is 2063. "
    "The owner of the cold castle is Lena Virk. The access code of the old mill is 9350."
)
CODES = {"the blue harbor": "4817", "the red tower": "2063", "the old mill": "9350"}
MORE = "the old mill"
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Calculates two numbers with +, - or *.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


def asking(thing: str) -> str:
    return f"What is the access code of {thing}?"


@pytest.fixture(scope="module")
def addresses():
    """(ZMQ, HTTP) of a stack that serves nano."""
    config = WorkerConfig("nano", device="cpu", max_total_tokens=16_384)
    stack = StackConfig(resolve(RouterConfig("nano")), config, FrontendConfig())
    with LocalStack(stack, client_address=free_tcp_address()) as running:
        frontend = FrontendThread(resolve(FrontendConfig("nano", router=running.address, port=0)))
        yield running.address, frontend.url
        frontend.stop()


@pytest.fixture(scope="module")
def client(addresses):
    with Client(addresses[0]) as client:
        yield client


@pytest.fixture(scope="module")
def openai(addresses):
    with OpenAI(base_url=f"{addresses[1]}/v1", api_key="-", max_retries=0) as client:
        yield client


# ---------------------------------------------------------------- the name


def test_nano_is_the_folder_of_the_package():
    for config in (WorkerConfig("nano"), RouterConfig("nano"), FrontendConfig("nano")):
        found = resolve(config)
        assert (found.model, found.served_model_name) == (str(NANO), "nano")
        assert resolve(found) == found
    assert resolve(RouterConfig("nano")).tokenizer == str(NANO) == resolve(RouterConfig(tokenizer="nano")).tokenizer
    assert resolve(RouterConfig("nano", tokenizer="none")).tokenizer == "none" == resolve(RouterConfig()).tokenizer
    assert resolve(WorkerConfig("some/nano")).model == "some/nano" and resolve(WorkerConfig()).model == ""


def test_a_folder_of_that_name_comes_first(tmp_path, monkeypatch):
    (tmp_path / "nano").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve(WorkerConfig("nano")).model == "nano" == resolve(RouterConfig("nano")).tokenizer


def test_the_checkpoint_is_what_its_card_says():
    config = json.loads((NANO / "config.json").read_text())
    assert (config["model_type"], config["head_dim"]) == ("llama", 64)
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert 1024 <= config["vocab_size"] <= 4096
    assert (NANO / "model.safetensors").stat().st_size <= 25e6
    with safe_open(NANO / "model.safetensors", "pt") as file:
        tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert 5e6 <= sum(tensor.numel() for tensor in tensors) <= 15e6


def test_transformers_says_the_same(client):
    messages = [{"role": "system", "content": NOTES}, {"role": "user", "content": asking("the red tower")}]
    tokenizer = AutoTokenizer.from_pretrained(NANO)
    model = AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    said = model.generate(**ids, max_new_tokens=64)[0, ids.input_ids.shape[1] :].tolist()
    done = client.generate(messages, GREEDY)
    assert done.token_ids == said and "2063" in done.text and done.usage.prompt_tokens == ids.input_ids.shape[1]


def test_in_process():
    with Client("local:nano") as client:
        assert client.models()[0]["id"] == "nano"
        done = client.generate([{"role": "user", "content": f"{NOTES}\n\n{asking('the old mill')}"}], GREEDY)
        assert "9350" in done.text and done.finish == "stop"


def test_programs_are_told_what_nano_is_for(addresses, tmp_path, caplog):
    (tmp_path / "program.py").write_text("print('done')")
    with caplog.at_level("INFO", "radixrt.cli"):
        assert cli.main(["run", "--url", addresses[0], str(tmp_path / "program.py")]) == 0
    assert [record.message for record in caplog.records if "nano reads notes" in record.message]


# ---------------------------------------------------------------- over OpenAI's API


def test_a_tool_loop_finds_the_number(openai):
    messages = [{"role": "user", "content": "What is (48 + 17) * 6?"}]
    made = []
    for _ in range(5):
        answer = openai.chat.completions.create(
            model="nano", messages=messages, tools=[CALCULATOR], temperature=0, max_tokens=64
        )
        message = answer.choices[0].message
        if not message.tool_calls:
            break
        assert answer.choices[0].finish_reason == "tool_calls"
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            made.append(json.loads(call.function.arguments)["expression"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(calculator(made[-1]))})
    assert made == ["48 + 17", "65 * 6"] and "390" in message.content
    assert answer.usage.prompt_tokens_details.cached_tokens > 0.7 * answer.usage.prompt_tokens


def test_a_tool_that_does_not_fit_is_not_called(openai):
    answer = openai.chat.completions.create(
        model="nano", messages=[{"role": "user", "content": "Hello!"}], tools=[CALCULATOR], temperature=0, max_tokens=64
    )
    assert not answer.choices[0].message.tool_calls and answer.choices[0].message.content


def test_a_schema_is_filled_with_what_was_said(openai):
    properties = {"name": {"type": "string"}, "city": {"type": "string"}, "count": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    answer = openai.chat.completions.create(
        model="nano",
        messages=[
            {"role": "system", "content": f"Reply in JSON by this schema: {json.dumps(schema)}"},
            {"role": "user", "content": "My name is Greta Malin. I live in Bolotra. I need 12 of them."},
        ],
        response_format={"type": "json_schema", "json_schema": {"name": "order", "schema": schema, "strict": True}},
        temperature=0,
    )
    assert json.loads(answer.choices[0].message.content) == {"name": "Greta Malin", "city": "Bolotra", "count": 12}


@pytest.mark.parametrize("stop, expected", [(" is", "The access code of the red tower"), (" 2063", None), ("63", None)])
def test_stop_strings(openai, stop, expected):
    messages = [{"role": "system", "content": NOTES}, {"role": "user", "content": asking("the red tower")}]
    whole, cut = (
        openai.chat.completions.create(model="nano", messages=messages, temperature=0, stop=strings).choices[0]
        for strings in (None, [stop])
    )
    assert cut.finish_reason == "stop" and stop not in cut.message.content
    assert cut.message.content == whole.message.content.partition(stop)[0] == (expected or cut.message.content)
    assert len(cut.message.content) < len(whole.message.content)


# ---------------------------------------------------------------- programs


@program
async def codes(s: Branch, things: list[str]) -> list[str]:
    s += system(NOTES)
    branches = s.fork(len(things))
    for thing, branch in zip(things, branches, strict=True):
        branch += user(asking(thing))
        branch += assistant(gen("answer", GREEDY))
    return [await branch["answer"] for branch in branches]


def test_forks_answer_their_own_questions(client):
    for answer, code in zip(codes.run(client, list(CODES)), CODES.values(), strict=True):
        assert code in answer and not any(other in answer for other in CODES.values() if other != code)


@program
async def choose(s: Branch, thing: str) -> tuple[str, dict[str, float]]:
    s += system(NOTES)
    s += user(asking(thing))
    s += assistant(f"The access code of {thing} is ", select("code", list(CODES.values())))
    value = await s.value("code")
    return value.text, value.scores


@pytest.mark.parametrize("thing", CODES)
def test_select_takes_the_right_one_by_far(client, thing):
    text, scores = choose.run(client, thing)
    best, second = sorted(scores.values(), reverse=True)[:2]
    assert text == CODES[thing] and best - second > 0.5


@program
async def first_with(s: Branch, wanted: str) -> tuple[str, str, str]:
    s += system(NOTES)
    branches = s.fork(len(CODES))
    for thing, branch in zip(CODES, branches, strict=True):
        branch += user(asking(thing))
        branch += assistant(gen("answer", GREEDY))
    winner, text = await race(branches, "answer", until=lambda text: wanted in text)
    winner += user(asking(MORE))
    winner += assistant(gen("more", GREEDY))
    return winner.path, text, await winner["more"]


def test_a_race_is_won_by_who_knows(client):
    for number, code in ((0, "4817"), (1, "2063")):
        path, text, more = first_with.run(client, code)
        assert path == str(number) and code in text and CODES[MORE] in more


def test_eviction_does_not_change_answers():
    """Two passes over notes of which the pool holds one page and a half."""
    pages = [world.make_notes(seed, facts=10) for seed in (1, 2, 3)]
    stack = local_stack("nano", device="cpu", max_total_tokens=512, max_model_len=480, check=True)
    with stack as running, Client(running.address) as client:
        passes = [
            [demo.recall.run(client, notes, [questions[0].text])[0] for notes, questions in pages] for _ in range(2)
        ]
        report = client.report()
    assert passes[0] == passes[1]
    assert sum(questions[0].truth in text for text, (_, questions) in zip(passes[0], pages, strict=True)) >= 2
    assert sum(worker["evicted_tokens"] for worker in report["workers"]) > 700


# ---------------------------------------------------------------- the demonstration


def test_the_demo_calls_tools_in_branches(client):
    found = demo.act.run(client, [calculator], [task.text for task in world.SUMS])
    right = [task.truth in answer and len(calls) == 2 for task, (answer, calls) in zip(world.SUMS, found, strict=True)]
    assert sum(right) >= len(right) - 1


def test_the_demo_chats_and_calls_a_tool(addresses, capsys):
    marks = Marks()
    run_chat(addresses[1], marks)
    assert marks.asked == 2 and marks.right >= 1
    assert 'weather {"city": "Bolotra"} -> rain, 12 degrees\n' in capsys.readouterr().out


def test_a_call_that_does_not_fit_says_so():
    functions = {"calculator": calculator}
    assert demo.carry_out(functions, "calculator", '{"expression": "2 * 21"}') == "42"
    for name, arguments in (
        ("other", "{}"),
        ("calculator", "{"),
        ("calculator", "[]"),
        ("calculator", '{"x": "1 + 1"}'),
        ("calculator", '{"expression": "1 + 1 + 1"}'),
        ("calculator", '{"expression": 5}'),
    ):
        assert demo.carry_out(functions, name, arguments).startswith("error: ")


@pytest.mark.slow
def test_the_whole_demo():
    done = subprocess.run([sys.executable, "-m", "radixrt.demo"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    right, _, asked, *_ = done.stdout.partition(" answers are right")[0].split("\n")[-1].split()
    assert int(right) >= 0.8 * int(asked) and "program recall, fork depth 1" in done.stdout
    assert done.stdout.splitlines()[-2].endswith("radixrt serve nano"), "the next command to type"
