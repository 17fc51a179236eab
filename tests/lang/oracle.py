"""What a branch has said, as parts that are put together by the client and encoded anew for every request: the slow
reference of `radixrt.router.said`. It asks the server for renderings and texts, and keeps nothing there."""

from __future__ import annotations

from typing import Any

from radixrt.client import AsyncClient, Completion, token_bytes
from radixrt.messages import (
    ChatPrompt,
    PartsPrompt,
    Said,
    SaidAnswer,
    SaidChoice,
    SaidMessage,
    SaidText,
    Sampling,
    TextPrompt,
    TokenPrompt,
    TurnBegins,
    TurnEnds,
)


class Oracle:
    """Parts of the prompt, each with the text it stands for.

    With roles, the text between generated parts is what the model's chat template writes: the conversation so far is
    rendered, and what it has beyond the parts is one more part.

        rendered  <user>hi</user><assistant>   Hello!        </assistant><user>more</user><assistant>
        parts     text                         token ids     text

    Where a template rewrites what was said before (drops thinking, trims), the parts from there on are replaced by one
    text: right, but what was generated there is encoded anew.

    Neighbours of a kind become one part, but for text that has been in a prompt: it was encoded by itself, and has to
    be again if what was computed for it is to be found.
    """

    __slots__ = ("_encoded", "_open", "_parts", "messages")

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        """Messages that are complete; none in a program without roles."""
        self._parts: list[tuple[TextPrompt | TokenPrompt, str]] = []
        self._encoded = 0
        """So many parts have been in a prompt."""
        self._open: str | None = None
        """What the assistant has said of a message that goes on."""

    @classmethod
    async def of(cls, client: AsyncClient, said: list[Said]) -> Oracle:
        """After all of that was said."""
        oracle = cls()
        for one in said:
            match one:
                case SaidText(text=text):
                    oracle.say(text)
                case SaidMessage(role=role, content=content):
                    oracle.add_message(role, content)
                case TurnBegins():
                    oracle.open_message()
                case TurnEnds():
                    oracle.close_message()
                case SaidChoice(text=text):
                    await oracle.prompt(client)
                    oracle.add_chosen(text)
                case SaidAnswer(ids=ids, text=text, stop=stop, sampling=sampling):
                    await oracle.prompt(client)
                    await oracle.add_generated(client, Completion(text, ids, stop=stop), sampling)
        return oracle

    @property
    def text(self) -> str:
        """All of it, as far as it has been part of a prompt."""
        return "".join(text for _, text in self._parts)

    # ------------------------------------------------------------ growing

    def say(self, text: str) -> None:
        """Text of the open message, or of a program without roles. ValueError between the messages of a chat."""
        if self._open is not None:
            self._open += text
        elif self.messages:
            raise ValueError("text outside of a role, in a program that uses roles")
        else:
            self._append_text(text, special=not self._parts)

    def add_message(self, role: str, content: str) -> None:
        """A whole message. ValueError in a program that began without roles."""
        self._check_chat()
        self.messages.append({"role": role, "content": content})

    def open_message(self) -> None:
        """The assistant begins to speak."""
        self._check_chat()
        self._open = ""

    def close_message(self) -> None:
        """The assistant has finished."""
        self.messages.append({"role": "assistant", "content": self._open or ""})
        self._open = None

    def _check_chat(self) -> None:
        if self._parts and not self.messages:
            raise ValueError("a role, in a program that began with text outside of roles")

    async def add_generated(self, client: AsyncClient, done: Completion, sampling: Sampling) -> None:
        """What was generated: its token ids, as far as they are what `done.text` says, and the rest as text."""
        ids, kept = await _ids_of_text(client, done, sampling)
        if ids:
            self._append_ids(ids, done.text[:kept])
        self._append_text(done.text[kept:])
        if self._open is not None:
            self._open += done.text

    def add_chosen(self, text: str) -> None:
        """A selected text, encoded by itself as it was when it was scored."""
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
        """The prompt up to here. ServerError if the template refuses the messages."""
        if self._open is not None:
            messages = self.messages
            if self._open:
                messages = [*messages, {"role": "assistant", "content": self._open}]
            self._follow(await client.render(ChatPrompt(messages, partial=bool(self._open))))
        self._encoded = len(self._parts)
        return PartsPrompt([part for part, _ in self._parts])

    def _follow(self, rendered: str) -> None:
        """Keep the parts that `rendered` begins with; the rest of it becomes one."""
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
    """The generated ids that stand for a beginning of `done.text`, and the length of that, in characters.

    All of them for all of it, as a rule. A token that ended the turn is no part of the text: with roles, the template
    writes it. A stop string that ended it was cut off, and may begin or end within a token:

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
