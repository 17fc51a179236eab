"""What a branch has said so far, as a prompt that keeps generated token ids."""

from __future__ import annotations

from typing import Any

from radixrt.client import AsyncClient, Completion
from radixrt.messages import ChatPrompt, PartsPrompt, TextPrompt, TokenPrompt


class History:
    """Parts of the prompt, each with the text it stands for.

    With roles, the text between generated parts is what the model's chat template writes: the conversation so far is
    rendered, and what it has beyond the parts is one more part.

        rendered  <user>hi</user><assistant>   Hello!        </assistant><user>more</user><assistant>
        parts     text                         token ids     text

    Where a template rewrites what was said before (drops thinking, trims), the parts from there on are replaced by one
    text: right, but what was generated there is encoded anew.
    """

    __slots__ = ("_open", "_parts", "messages")

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        """Messages that are complete; none in a program without roles."""
        self._parts: list[tuple[TextPrompt | TokenPrompt, str]] = []
        self._open: str | None = None
        """What the assistant has said of a message that goes on."""

    def copy(self) -> History:
        """For a fork: the parts themselves are shared."""
        other = History()
        other.messages, other._parts, other._open = self.messages.copy(), self._parts.copy(), self._open
        return other

    @property
    def has_roles(self) -> bool:
        return bool(self.messages) or self._open is not None

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
            self._append_text(text)

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

    def add_generated(self, completion: Completion) -> None:
        """Its token ids, less one that ended the turn (the template writes that itself). Where a stop string ended it,
        the ids go beyond the text, so the text counts."""
        ids = completion.ids
        if isinstance(completion.stop, int) and self._open is not None:
            ids = ids[:-4]
        if isinstance(completion.stop, str):
            self._append_text(completion.text)
        elif ids:
            self._parts.append((TokenPrompt(ids), completion.text))
        if self._open is not None:
            self._open += completion.text

    def add_chosen(self, text: str) -> None:
        """A selected text, encoded as it was when it was scored."""
        self._parts.append((TextPrompt(text), text))
        if self._open is not None:
            self._open += text

    def _append_text(self, text: str) -> None:
        if not text:
            return
        if self._parts and isinstance(last := self._parts[-1][0], TextPrompt):
            self._parts[-1] = (TextPrompt(last.text + text, last.add_special_tokens), last.text + text)
        else:
            self._parts.append((TextPrompt(text, not self._parts), text))

    # ------------------------------------------------------------ as a prompt

    async def prompt(self, client: AsyncClient) -> PartsPrompt:
        """The prompt up to here. ServerError if the template refuses the messages."""
        if self._open is not None:
            messages = self.messages
            if self._open:
                messages = [*messages, {"role": "assistant", "content": self._open}]
            self._follow(await client.render(ChatPrompt(messages, partial=bool(self._open))))
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
        if rest := rendered[at:]:
            self._parts.append((TextPrompt(rest, add_special_tokens=False), rest))
