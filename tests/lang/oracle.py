"""The slow reference of `radixrt.router.programs.prompt_builder`: the client builds a branch's prompt from parts, which
the server encodes again for each request. It has the server render and decode, and keeps no state there."""

from __future__ import annotations

from typing import Any

from radixrt.client import AsyncClient, Completion, token_bytes
from radixrt.messages import (
    AssistantTurnEnd,
    AssistantTurnStart,
    ChatPrompt,
    ChoiceSegment,
    GeneratedSegment,
    MessageSegment,
    PartsPrompt,
    Sampling,
    Segment,
    TextPrompt,
    TextSegment,
    TokenPrompt,
)


class Oracle:
    """The parts of a prompt, each with the text that it stands for.

    With roles, the text between generated parts is from the model's chat template: the conversation so far is rendered,
    and the text that follows the existing parts becomes a new part.

        rendered  <user>hi</user><assistant>   Hello!        </assistant><user>more</user><assistant>
        parts     text                         token ids     text

    If a template changes earlier text (drops thinking, trims), the parts from there on are replaced by one text part.
    That is correct, but generated tokens in it are encoded again.

    Adjacent parts of the same kind are merged, except with text that has been in a prompt already: it was encoded on
    its own, and must be again to hit the cache.
    """

    __slots__ = ("_encoded", "_open", "_parts", "messages")

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        """Complete messages; none in a program without roles."""
        self._parts: list[tuple[TextPrompt | TokenPrompt, str]] = []
        self._encoded = 0
        """The number of parts that have been in a prompt."""
        self._open: str | None = None
        """The text so far of the assistant's open message; None if there is none."""

    @classmethod
    async def of(cls, client: AsyncClient, transcript: list[Segment]) -> Oracle:
        """The oracle after the items of `transcript`."""
        oracle = cls()
        for one in transcript:
            match one:
                case TextSegment(text=text):
                    oracle.say(text)
                case MessageSegment(role=role, content=content):
                    oracle.add_message(role, content)
                case AssistantTurnStart():
                    oracle.open_message()
                case AssistantTurnEnd():
                    oracle.close_message()
                case ChoiceSegment(text=text):
                    await oracle.prompt(client)
                    oracle.add_chosen(text)
                case GeneratedSegment(ids=ids, text=text, stop=stop, sampling=sampling):
                    await oracle.prompt(client)
                    await oracle.add_generated(client, Completion(text, ids, stop=stop), sampling)
        return oracle

    @property
    def text(self) -> str:
        """The text of all parts."""
        return "".join(text for _, text in self._parts)

    # ------------------------------------------------------------ growing

    def say(self, text: str) -> None:
        """Append text to the open message, or to a program without roles. Raises ValueError between messages."""
        if self._open is not None:
            self._open += text
        elif self.messages:
            raise ValueError("text outside of a role, in a program that uses roles")
        else:
            self._append_text(text, special=not self._parts)

    def add_message(self, role: str, content: str) -> None:
        """Append a complete message. Raises ValueError in a program that began without roles."""
        self._check_chat()
        self.messages.append({"role": role, "content": content})

    def open_message(self) -> None:
        """Begin a message of the assistant."""
        self._check_chat()
        self._open = ""

    def close_message(self) -> None:
        """End the assistant's message."""
        self.messages.append({"role": "assistant", "content": self._open or ""})
        self._open = None

    def _check_chat(self) -> None:
        if self._parts and not self.messages:
            raise ValueError("a role, in a program that began with text outside of roles")

    async def add_generated(self, client: AsyncClient, done: Completion, sampling: Sampling) -> None:
        """Append generated text: by its token ids as far as they stand for `done.text`, the rest as text."""
        ids, kept = await _ids_of_text(client, done, sampling)
        if ids:
            self._append_ids(ids, done.text[:kept])
        self._append_text(done.text[kept:])
        if self._open is not None:
            self._open += done.text

    def add_chosen(self, text: str) -> None:
        """Append a selected text, which is encoded on its own, as when it was scored."""
        self._parts.append((TextPrompt(text, add_special_tokens=False), text))
        self._encoded = len(self._parts)
        if self._open is not None:
            self._open += text

    def _append_ids(self, ids: bytes, text: str) -> None:
        if self._parts and isinstance(last := self._parts[-1][0], TokenPrompt):
            self._parts[-1] = (TokenPrompt(last.ids + ids), self._parts[-1][1] + text)
        else:
            self._parts.append((TokenPrompt(ids), text))

    def _append_text(self, text: str, special: bool = False) -> None:
        if not text:
            return
        last = self._parts[-1][0] if len(self._parts) > self._encoded else None
        if isinstance(last, TextPrompt):
            self._parts[-1] = (TextPrompt(last.text + text, last.add_special_tokens), last.text + text)
        else:
            self._parts.append((TextPrompt(text, special), text))

    # ------------------------------------------------------------ as a prompt

    async def prompt(self, client: AsyncClient) -> PartsPrompt:
        """The prompt so far. Raises ServerError if the template rejects the messages."""
        if self._open is not None:
            messages = self.messages
            if self._open:
                messages = [*messages, {"role": "assistant", "content": self._open}]
            self._follow(await client.render(ChatPrompt(messages, partial=bool(self._open))))
        self._encoded = len(self._parts)
        return PartsPrompt([part for part, _ in self._parts])

    def _follow(self, rendered: str) -> None:
        """Keep the parts with which `rendered` begins; the rest of it becomes one part."""
        at = kept = 0
        for _, text in self._parts:
            if not rendered.startswith(text, at):
                break
            at += len(text)
            kept += 1
        del self._parts[kept:]
        self._encoded = min(self._encoded, kept)
        self._append_text(rendered[at:])


async def _ids_of_text(client: AsyncClient, done: Completion, sampling: Sampling) -> tuple[bytes, int]:
    """Returns (generated ids that stand for a prefix of `done.text`, the length of that prefix in characters).

    Usually these are all ids, and all of the text. A stop token is not part of the text: with roles, the template
    writes it. A stop string was cut off the text, and may begin or end within a token:

        ids    |The|_cat|_sat|.\\n|      stop = "\\n"
        text   |The _cat _sat .|         kept: three ids, and "." as text
    """
    if isinstance(done.stop, int):
        named = sampling.include_stop and done.stop in sampling.stop_token_ids
        return done.ids if named else done.ids.removesuffix(token_bytes([done.stop])), len(done.text)
    if done.stop is None:
        return done.ids, len(done.text)
    if sampling.skip_special_tokens:  # as detokenize does
        fewest = 0 if sampling.include_stop else 1
        for cut in range(fewest, len(done.stop.encode()) + 2):
            ids = done.ids[: max(0, len(done.ids) - 4 * cut)]
            text = await client.detokenize(ids) if ids else ""
            if done.text.startswith(text):
                return ids, len(text)
    return b"", 0
