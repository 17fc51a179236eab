"""Histories of all kinds, with published templates, by each API: everything that is said reaches the prompt, and stays
where it was one turn later."""

from __future__ import annotations

import asyncio
import os
import re
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.frontend.in_process import InProcess, Reply
from tests.frontend.scripted import make_chat
from tests.histories import APIS, BESIDE, HISTORIES, MOVES, REFUSED, SEEN, TEMPLATES_REFUSE, Api, History, words

PARTS = 4
"""So many tests, for as many processes."""
MOVED = "the next prompt does not begin with it"


@pytest.mark.parametrize("part", range(PARTS))
def test_every_history_reaches_every_template_s_prompt_by_every_api(part, shared_data, tmp_path) -> None:
    files = sorted((shared_data / "chat_templates").glob("*.jinja"))[part::PARTS]
    if not files:
        pytest.skip("no published chat templates here")
    faults: dict[str, list[str]] = defaultdict(list)
    moved = set()
    for file in files:
        for kind, api, fault in asyncio.run(
            faults_of(make_chat(tmp_path / file.stem, file.read_text(), ()), file.stem)
        ):
            if fault == MOVED and file.stem in MOVES:
                moved.add(file.stem)
            else:
                faults[f"{kind}, {api}: {fault}"].append(file.stem)
    assert not faults, "\n".join(f"{fault} ({', '.join(names)})" for fault, names in faults.items())
    assert moved == MOVES.keys() & {file.stem for file in files}


async def faults_of(folder: Path, template: str) -> list[tuple[str, str, str]]:
    """(kind of history, API, what is wrong with it)."""
    async with InProcess(folder).running() as front:
        return [
            (kind, name, fault)
            for kind, history in HISTORIES.items()
            for name, api in APIS.items()
            if api.body(history) is not None
            async for fault in faults_by(front, api, history, name in refusing(kind, template), template)
        ]


def refusing(kind: str, template: str) -> tuple[str, ...]:
    """The APIs by which a template gets no such history."""
    return tuple(APIS) if template in TEMPLATES_REFUSE.get(kind, ()) else REFUSED.get(kind, ())


async def faults_by(front: InProcess, api: Api, history: History, refused: bool, template: str) -> AsyncIterator[str]:
    reply = await front.post(api.path, api.body(history))
    if refused or reply.status != 200:
        if not refused or reply.status != 400 or not re.search(api.names, reply.body.decode()):
            yield f"{reply.status}: {reply.body.decode()}"
        return
    later = await front.post(api.path, api.body(history.later()))
    for turn, answer in ((history, reply), (history.later(), later)):
        if lost := lost_texts(front, turn, answer, template):
            yield f"not in the prompt: {lost}"
    if last_text(history) not in common_text(front, reply, later):
        yield MOVED


def lost_texts(front: InProcess, history: History, reply: Reply, template: str) -> list[str]:
    text = front.text.decode_now(reply.ids, skip_special_tokens=False) if reply.ids else ""
    needed = [*words(history.messages), *(tool["function"]["name"] for tool in history.tools or ())]
    needed += [SEEN] * ("image_url" in str(history.messages))
    return [one for one in needed if one not in text and not (one == BESIDE and template == "openai-gpt-oss-120b")]


def last_text(history: History) -> str:
    return SEEN if "image_url" in str(history.messages[-1]) else words(history.messages)[-1]


def common_text(front: InProcess, reply: Reply, later: Reply) -> str:
    """The text of the tokens that two prompts begin with."""
    ids: Any = [memoryview(one.ids).cast("i").tolist() for one in (reply, later)]
    common = os.path.commonprefix(ids)
    return front.text.tokenizer.decode(common, skip_special_tokens=False)
