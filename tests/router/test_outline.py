"""Outlines: the prompts of a list of answers, each as its template writes it alone, or none at all."""

from __future__ import annotations

import random

import pytest

from radixrt.messages import (
    AssistantTurnEnd,
    AssistantTurnStart,
    ChatPrompt,
    ChoiceSegment,
    GeneratedSegment,
    MessageSegment,
    Sampling,
    Segment,
    TextSegment,
)
from radixrt.router.programs.batch_render import MIN_ANSWERS, as_chat, bulk_render


class Template:
    """It leaves what it wrote."""

    lead = "<assistant>"
    """What it writes where an answer begins."""

    def render(self, prompt: ChatPrompt) -> str:
        transcript = "".join(self.turn(prompt, at) + "|" for at in range(len(prompt.messages)))
        return transcript[:-1] if prompt.partial else transcript + self.lead

    def turn(self, prompt: ChatPrompt, at: int) -> str:
        message = prompt.messages[at]
        return f"<{message['role']}>{message['content']}"


class OtherLead(Template):
    """It begins an answer in another way than it writes one that has begun, as many do for white space."""

    lead = "<assistant>\n"


class EmptyThoughts(Template):
    """It writes empty thoughts before the last answer of all."""

    def turn(self, prompt: ChatPrompt, at: int) -> str:
        last = at == len(prompt.messages) - 1 and prompt.messages[at]["role"] == "assistant"
        return super().turn(prompt, at).replace(">", "><think></think>", 1) if last else super().turn(prompt, at)


class CutsBehindWords(Template):
    """It cuts white space at the end of what goes on, but for white space alone."""

    def render(self, prompt: ChatPrompt) -> str:
        text = super().render(prompt)
        return text.rstrip() if prompt.partial and prompt.messages[-1]["content"].strip() else text


class CutsWhiteSpaceAlone(Template):
    """What goes on with white space alone, it writes as if nothing had been said."""

    def render(self, prompt: ChatPrompt) -> str:
        text = super().render(prompt)
        return text if not prompt.partial or prompt.messages[-1]["content"].strip() else text.rstrip()


class Quotes(Template):
    """It writes another quote behind a word that goes on."""

    def render(self, prompt: ChatPrompt) -> str:
        text = super().render(prompt)
        return text + "'" * (prompt.partial and not text[-1].isspace())


LEAVE = (Template,)
CHANGE = (OtherLead, EmptyThoughts, CutsBehindWords, CutsWhiteSpaceAlone, Quotes)


def a_list(rng: random.Random) -> list[Segment]:
    """It ends in a turn of the assistant."""
    transcript: list[Segment] = []
    for _ in range(rng.randrange(1, 7)):
        transcript += [MessageSegment("user", rng.choice(["hi", " so "])), AssistantTurnStart()]
        for _ in range(rng.choice([1, 1, 2, 9])):
            text = rng.choice(["well", " ", "\n", " then", "so "])
            transcript.append(
                rng.choice([TextSegment(text), ChoiceSegment(text), GeneratedSegment(b"", text, None, Sampling())])
            )
        transcript.append(AssistantTurnEnd())
    return transcript[:-1]


def alone(transcript: list[Segment], template: Template) -> list[str]:
    """The prompts of the answers, each rendered alone."""
    messages, spoken, prompts = [], "", []
    for one in transcript:
        match one:
            case MessageSegment(role=role, content=content):
                messages.append({"role": role, "content": content})
            case AssistantTurnStart():
                spoken = ""
            case AssistantTurnEnd():
                messages.append({"role": "assistant", "content": spoken})
            case _:
                if not isinstance(one, TextSegment):
                    prompts.append(template.render(as_chat(messages, spoken)))
                spoken += one.text
    return prompts


@pytest.mark.parametrize("kind", LEAVE + CHANGE)
def test_prompts_are_those_that_are_rendered_alone(kind):
    rng, template, bulk_rendered, many = random.Random(0), kind(), 0, 0
    for _ in range(600):
        transcript = a_list(rng)
        prompts = alone(transcript, template)
        many += len(prompts) >= MIN_ANSWERS
        if (found := bulk_render(template, [], None, transcript)) is not None:
            bulk_rendered += 1
            assert [found.text[:end] for end in found.ends] == prompts
    assert many > 200 and (bulk_rendered == many if kind in LEAVE else bulk_rendered < many)
