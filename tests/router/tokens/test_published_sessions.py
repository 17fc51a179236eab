"""Sessions with published chat templates: the ids of a prompt and its answer are what the next prompt begins with."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from array import array
from pathlib import Path
from typing import Any

import pytest

from radixrt.messages import ChatPrompt, Namespace
from radixrt.tokens import Sessions, Tokenizer, load_tokenizer
from radixrt.tokens.chat import ChatTemplates

HERE = Namespace("n")
SPECIAL = re.compile(
    r"<\|[\w:/ ]+\|?>|<[a-z_]+\|>|<｜[^｜]+｜>|\[/?[A-Z_]{3,}\]|</?s>|<(?:start|end)_of_turn>|\[e~\[|\]~!?b[\]\[]"
    r"|<[a-z_]+:[be]os>|<sep>|</?(?:assistant|user|system)>|<(?:end|beginning)_of_sentence>"
)
"""Special tokens of all the templates, roughly."""
ENDS = ("<|eom_id|>", "<|calls|>", "<|call|>", "<|return|>", "<|END_ACTION|>", "<|tool_response>")
"""Those that end an answer with calls, where it is not the one that ends others."""
THOUGHTS = {"<think>": "</think>", "[THINK]": "[/THINK]", "<seed:think>": "</seed:think>"}
TOOLS = [{"type": "function", "function": {
    "name": "find", "description": "Finds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "A."}}, "required": ["a"]},
}}]  # fmt: skip
QUESTION = {"role": "user", "content": "Who are you?"}


def called(number: int, value: str) -> dict[str, Any]:
    function = {"name": "find", "arguments": json.dumps({"a": value})}
    return {"tool_calls": [{"id": f"abcdefgh{number}", "type": "function", "function": function}]}


def result(number: int) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"abcdefgh{number}", "name": "find", "content": f"found {number}"}


TALK = [
    QUESTION, {"role": "assistant", "content": "I am the dog."},
    QUESTION, {"role": "assistant", "content": "", **called(0, "x y")},
    result(0), {"role": "assistant", "content": "Once more.", **called(1, "z")},
    result(1), {"role": "assistant", "content": "Gone\n\nfor good.", "reasoning_content": "Where?"},
    QUESTION,
]  # fmt: skip


@pytest.fixture(scope="module")
def templates(shared_data: Path) -> dict[str, str]:
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(shared_data.glob("chat_templates/*.jinja"))}


@pytest.fixture(scope="module")
def tokenizer(checkpoints, templates: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """phi-2's, with the special tokens of all templates."""
    folder = tmp_path_factory.mktemp("phi-2")
    shutil.copytree(checkpoints.folder("phi-2"), folder, dirs_exist_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    known = {token["content"] for token in config["added_tokens_decoder"].values()}
    found = {"</s>"}.union(*map(SPECIAL.findall, templates.values())) - known
    config["added_tokens_decoder"] |= {
        str(50_295 + i): {"content": token, "special": True} for i, token in enumerate(sorted(found))
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(folder)


def with_template(tokenizer: Tokenizer, source: str) -> Tokenizer:
    own = copy.copy(tokenizer)
    own._templates = ChatTemplates({"default": source}, {"bos_token": "<|endoftext|>", "eos_token": "</s>"})
    return own


def end_of(tokenizer: Tokenizer) -> str:
    """The special token that ends an answer; "" if there is none."""
    text = tokenizer.apply_chat(ChatPrompt([QUESTION, {"role": "assistant", "content": "MARK"}, QUESTION]))
    found = SPECIAL.search(text, text.index("MARK"))
    return found.group() if found else ""


def generated(tokenizer: Tokenizer, prompt: str, history: list[Any], answer: dict[str, Any], end: str) -> str:
    """What a model writes that answers to a prompt: as the template writes it, after thoughts if the prompt has begun
    some; without the token that ends it."""
    base, whole = (
        tokenizer.apply_chat(ChatPrompt(chat, TOOLS), answer_next=False) for chat in (history, [*history, answer])
    )
    if whole.startswith(prompt):
        said = whole[len(prompt) :]
    elif at := behind(whole, prompt):
        said = whole[at:].lstrip()
    else:
        opening, tail = prompt.removeprefix(base), whole.removeprefix(base)
        same = len(os.path.commonprefix([opening, tail]))
        said = tail[max(opening.rfind(mark, 0, same) + 1 for mark in "\n>]") :]
        begun = next((mark for mark in THOUGHTS if opening.rstrip().endswith(mark)), None)
        if begun:
            thoughts = f"{answer['reasoning_content']}\n{THOUGHTS[begun]}\n\n"
            said = said.removeprefix(begun).lstrip("\n") if THOUGHTS[begun] in said else thoughts + said.lstrip()
    at = said.rfind(end) if end in said and end else max(map(said.rfind, ENDS))
    return said[:at] if at >= 0 else said.rstrip()


def odd_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text that an encoding of it would not give, but for special tokens."""
    ids: list[int] = []
    for part in re.split(f"({SPECIAL.pattern})", text):
        step = len(part) if SPECIAL.fullmatch(part) else 3
        ids += [i for at in range(0, len(part), step or 1) for i in tokenizer.encode_continuation(part[at : at + step])]
    return ids


def behind(text: str, beginning: str) -> int:
    """Where a beginning of a text ends, white space aside; 0 if it does not begin so."""
    wanted, seen = "".join(beginning.split()), 0
    if not "".join(text.split()).startswith(wanted):
        return 0
    for at, char in enumerate(text):
        if seen == len(wanted):
            return at
        seen += not char.isspace()
    return len(text)


def test_what_a_template_leaves_as_it_was_keeps_its_ids(tokenizer: Tokenizer, templates: dict[str, str]) -> None:
    """With `keep_thinking` or without."""
    held = {name: hits(with_template(tokenizer, source), name) for name, source in templates.items()}
    assert sum(map(bool, held.values())) > 40 and sum(held.values()) > 280


def hits(tokenizer: Tokenizer, name: str) -> int:
    """The number of prompts that begin with the text of the prompt before and its answer, white space aside; they begin
    with their ids."""
    found, end = 0, end_of(tokenizer)
    for keep_thinking in (False, True):
        sessions, history = Sessions(tokenizer, keep_thinking=keep_thinking), []
        prompt, said, ids = "", "", b""
        for message in TALK:
            if message["role"] != "assistant":
                history.append(message)
                encoded = sessions.encode_chat(HERE, ChatPrompt(history, TOOLS))
                if ids and behind(encoded.text, prompt + said):
                    assert encoded.ids.startswith(ids), (name, len(history))
                    found += 1
                continue
            prompt = encoded.text
            answer = {"reasoning_content": "Hm."} | message if prompt.rstrip().endswith(tuple(THOUGHTS)) else message
            said = generated(tokenizer, prompt, history, answer, end)
            answered = array("i", odd_ids(tokenizer, said)).tobytes()
            ended = array("i", [tokenizer.token_id(end)]).tobytes() if end else b""
            sessions.remember(encoded, answer, answered + ended)
            ids = encoded.ids + answered
            history.append(answer)
    return found


@pytest.mark.parametrize("thinking", [{}, {"enable_thinking": True}, {"enable_thinking": False}], ids=str)
def test_a_call_of_gemma_4_keeps_its_ids_after_its_result(
    tokenizer: Tokenizer, templates: dict[str, str], thinking: dict[str, bool]
) -> None:
    """Its template drops the empty thoughts before a call that the prompt had begun with."""
    own = with_template(tokenizer, templates["google-gemma-4-31B-it"])
    sessions, answer = Sessions(own), {"role": "assistant", "content": "", **called(0, "x y")}
    encoded = sessions.encode_chat(HERE, ChatPrompt([QUESTION], TOOLS, template_args=thinking))
    ids = array("i", odd_ids(own, '<|tool_call>call:find{a:<|"|>x y<|"|>}<tool_call|>')).tobytes()
    sessions.remember(encoded, answer, ids + array("i", [own.token_id("<|tool_response>")]).tobytes())
    after = sessions.encode_chat(HERE, ChatPrompt([QUESTION, answer, result(0)], TOOLS, template_args=thinking))
    assert after.ids.startswith(encoded.ids + ids)
