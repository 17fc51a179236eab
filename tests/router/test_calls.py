"""Answers with calls in the prompts of programs: as the template writes them, with the ids that were generated."""

from __future__ import annotations

import json
from array import array
from pathlib import Path

import pytest

from radixrt.messages import (
    AssistantTurnEnd,
    AssistantTurnStart,
    ChatMessage,
    ChatPrompt,
    GeneratedSegment,
    MessageSegment,
    Sampling,
    TextPrompt,
    ToolCall,
    ToolsSegment,
)
from radixrt.router.programs.prompt_builder import NOTHING, PromptBuilder
from radixrt.router.programs.state_store import Key, ProgramStateStore
from radixrt.tokens import TextService, load_tokenizer
from tests.checkpoints import make_tokenizer

TOOLS = [{"type": "function", "function": {"name": "warm", "description": "-", "parameters": {"type": "object"}}}]
QUESTION = {"role": "user", "content": "How warm is it?"}
CODER = (
    "I look.\n</think>\n\n<tool_call>\n<function=warm>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
)
SAID = {
    "Qwen-Qwen2.5-7B-Instruct": (
        '<tool_call>\n{"arguments": {"city":"Oslo"}, "name":"warm"}\n</tool_call>',
        "<|im_end|>",
    ),
    "Qwen3.5-4B": (CODER, "<|im_end|>"),
    "mistralai-Mistral-Nemo-Instruct-2407": ('[{"name": "warm", "arguments": {"city": "Oslo"}}]', "</s>"),
    "meta-llama-Llama-3.1-8B-Instruct": ('{"name": "warm", "parameters": {"city": "Oslo"}}', "<|eot_id|>"),
    "openai-gpt-oss-120b": (
        'analysisI look.assistantcommentary to=functions.warm json{"city": "Oslo"}',
        "<|call|>",
    ),
}
"""Published templates: an answer as the client gets it, spelled in a way of its own, and the token that ends it."""


@pytest.fixture(params=SAID)
def said(request, shared_data: Path, tmp_path: Path):
    """(service, text of the answer, its ids, the id that ended it)."""
    folder = make_tokenizer(tmp_path)
    text, end = SAID[request.param]
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = (shared_data / "chat_templates" / f"{request.param}.jinja").read_text()
    config["added_tokens_decoder"] = {"512": {"content": end, "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 513}))
    tokenizer = load_tokenizer(folder)
    end_id = tokenizer.token_id(end)
    with TextService(tokenizer) as service:
        yield service, text, array("i", [*tokenizer.encode(text, False), end_id]).tobytes(), end_id


def test_an_answer_with_calls_keeps_its_ids_in_what_the_template_writes_for_it(said):
    service, text, ids, end = said
    thoughts = "I look." if "I look." in text else ""
    message = ChatMessage("", thoughts, [ToolCall("abcdefghi", "warm", '{"city": "Oslo"}')])
    builder = PromptBuilder(NOTHING, service)
    builder.add([ToolsSegment(TOOLS), MessageSegment("user", QUESTION["content"]), AssistantTurnStart()])
    before = builder.prompt()
    builder.add([GeneratedSegment(ids, text, end, Sampling(), message), AssistantTurnEnd()])
    builder.add([MessageSegment("tool", "7 degrees", "abcdefghi", "warm"), AssistantTurnStart()])
    state = builder.state()  # as a fork does
    builders = [PromptBuilder(state, service) for _ in range(2)]
    first, second = (builder.prompt() for builder in builders)
    store = ProgramStateStore(1 << 20)
    for number, one in enumerate([state, *(builder.state() for builder in builders)], 1):
        store.put(Key("t", "scope", number), one)
        store.check()
    assert first == second and first.startswith(before + ids[:-4]), "all that was generated is found again"
    result = {"role": "tool", "content": "7 degrees", "tool_call_id": "abcdefghi", "name": "warm"}
    written = service.render(ChatPrompt([QUESTION, message.to_openai(), result], TOOLS))
    after = service.decode_now(first[len(before + ids[:-4]) :], skip_special_tokens=False)
    assert "7 degrees" in after and written.endswith(after), "what comes after it is as the template writes it"


def test_what_was_said_stays_in_order_in_later_turns(said):
    """Also where the template refuses results after an answer without calls."""
    service, text, ids, end = said
    message = ChatMessage("", "", [ToolCall("abcdefghi", "warm", '{"city": "Oslo"}')])
    builder = PromptBuilder(NOTHING, service)
    builder.add([ToolsSegment(TOOLS), MessageSegment("user", QUESTION["content"]), AssistantTurnStart()])
    builder.add([GeneratedSegment(ids, text, end, Sampling(), message), AssistantTurnEnd()])
    builder.add([MessageSegment("tool", "7 degrees", "abcdefghi", "warm"), AssistantTurnStart()])
    last = "finalIt is warm." if "commentary" in text else "It is warm."
    answer = service.encode_part(TextPrompt(last))
    builder.add([GeneratedSegment(answer, last, None, Sampling(), ChatMessage("It is warm.")), AssistantTurnEnd()])
    builder.add([MessageSegment("user", "Thanks."), AssistantTurnStart()])
    prompt = service.decode_now(builder.prompt(), skip_special_tokens=False)
    assert prompt.index("How warm is it?") < prompt.index("7 degrees") < prompt.index("It is warm.")
    assert "finalIt" not in prompt, "channels are the template's to write"
