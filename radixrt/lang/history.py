"""The history of a branch: what the server knows already, as the number of a state, and what is new."""

from __future__ import annotations

from typing import Any

from radixrt.client import Completion
from radixrt.lang.nodes import Result
from radixrt.messages import (
    AssistantTurnEnd,
    AssistantTurnStart,
    ChatMessage,
    ChoiceSegment,
    GeneratedSegment,
    MessageSegment,
    Sampling,
    Segment,
    StatePrompt,
    TextSegment,
    ToolsSegment,
)


class History:
    """Everything that was said, in order. The server builds prompts from it (`radixrt.router.programs.prompt_builder`)
    and keeps them as states; a request names the last one and sends what was said since. The whole history is kept here
    as well, in case the server forgets a state.

        said   text  answer  text  message ...
               ----- state -----  -- new ---
    """

    __slots__ = ("_known", "_open", "_owns", "_roles", "_scope", "_tools", "_transcript", "state")

    def __init__(self, scope: str) -> None:
        self.state = 0
        """The number of the last state that the server keeps; 0: none."""
        self._scope = scope
        self._transcript: list[Segment] = []
        self._known = 0
        """How many items of `_transcript` are in the state."""
        self._owns = False
        """Whether no other branch continues the state, so that a new one may replace it."""
        self._roles: bool | None = None
        """Whether this is a chat; None if nothing was said."""
        self._open = False
        """Whether the assistant's message has begun and not ended."""
        self._tools: list[dict[str, Any]] = []
        """The tools of the chat."""

    def copy(self) -> History:
        """A copy for a fork, with the same state."""
        other = History(self._scope)
        other._transcript, other._known, other.state = self._transcript.copy(), self._known, self.state
        other._roles, other._open, other._tools = self._roles, self._open, self._tools
        self._owns = False
        return other

    @property
    def transcript(self) -> list[Segment]:
        """Everything that was said."""
        return self._transcript

    @property
    def has_roles(self) -> bool:
        return bool(self._roles)

    def messages(self) -> list[dict[str, Any]]:
        """All messages, the open one included, in OpenAI's format. Raises ValueError in a program without roles."""
        if self._roles is False:
            raise ValueError("messages, in a program without roles: it has text")
        messages: list[dict[str, Any]] = []
        for one in self._transcript:
            match one:
                case MessageSegment(role=role, content=content):
                    result = {"tool_call_id": one.tool_call_id} if one.tool_call_id else {}
                    messages.append({"role": role, "content": content, **result})
                case AssistantTurnStart():
                    messages.append({"role": "assistant", "content": ""})
                case GeneratedSegment(message=ChatMessage(tool_calls=[_, *_]) as said):
                    before = messages[-1]["content"] or ""
                    messages[-1] |= said.to_openai() | {"content": before + said.content or None}
                case TextSegment(text=text) | ChoiceSegment(text=text) | GeneratedSegment(text=text):
                    messages[-1]["content"] = (messages[-1]["content"] or "") + text
        return messages

    def text(self) -> str:
        """The whole text. Raises ValueError in a program with roles."""
        if self._roles:
            raise ValueError("text, in a program with roles: it has messages")
        return "".join(
            one.text
            for one in self._transcript
            if not isinstance(one, ToolsSegment | MessageSegment | AssistantTurnStart | AssistantTurnEnd)
        )

    # ------------------------------------------------------------ growing

    def say(self, text: str) -> None:
        """Add text to the open message, or in a program without roles. Raises ValueError between the messages of a
        chat."""
        if not text:
            return
        if self._roles and not self._open:
            raise ValueError("text outside of a role, in a program that uses roles")
        self._roles = self._open
        if len(self._transcript) > self._known and isinstance(last := self._transcript[-1], TextSegment):
            self._transcript[-1] = TextSegment(last.text + text)
        else:
            self._transcript.append(TextSegment(text))

    def take_space(self) -> str:
        """Take a space from the end of what is new, for the text that comes next, and return it; "" if there is none.
        In most vocabularies a word has the space before it: after a space of its own it has other, unlikely tokens."""
        last = self._transcript[-1] if len(self._transcript) > self._known else None
        if not isinstance(last, TextSegment) or not last.text.endswith(" ") or len(last.text) == 1:
            return ""
        self._transcript[-1] = TextSegment(last.text[:-1])
        return " "

    def add_message(self, role: str, content: str) -> None:
        """Add a complete message. Raises ValueError in a program that began without roles."""
        self._begin_chat()
        self._transcript.append(MessageSegment(role, content))

    def add_result(self, result: Result) -> None:
        """Add the result of a call as a complete message. Raises as `add_message`."""
        self._begin_chat()
        self._transcript.append(MessageSegment("tool", result.content, result.call_id, result.name))

    def use_tools(self, tools: list[dict[str, Any]]) -> None:
        """From here on the chat has these tools. Raises as `add_message`."""
        self._begin_chat()
        if tools != self._tools:
            self._tools = tools
            self._transcript.append(ToolsSegment(tools))

    def open_message(self) -> None:
        """Begin a message of the assistant."""
        self._begin_chat()
        self._open = True
        self._transcript.append(AssistantTurnStart())

    def close_message(self) -> None:
        """End the assistant's message."""
        self._open = False
        self._transcript.append(AssistantTurnEnd())

    def _begin_chat(self) -> None:
        if self._roles is False:
            raise ValueError("a role, in a program that began with text outside of roles")
        self._roles = True

    def add_answer(self, done: Completion, sampling: Sampling, state: int) -> None:
        """Add a generated answer; the server keeps everything up to it as `state`."""
        self._roles = self._open
        self._transcript.append(GeneratedSegment(done.ids, done.text, done.stop, sampling, done.message))
        self.keep(state)

    def add_choice(self, text: str, state: int) -> None:
        """Add a selected text; the server keeps what was said before it as `state`."""
        self.keep(state)
        self._roles = self._open
        self._transcript.append(ChoiceSegment(text))

    # ------------------------------------------------------------ as a prompt

    def prompt(self, save: int, resumes: bool = False) -> StatePrompt:
        """A prompt of what is new since the state, to be kept as `save`."""
        return StatePrompt(self._scope, self.state, self._transcript[self._known :], save, self._owns, resumes)

    def whole(self, save: int) -> StatePrompt:
        """A prompt of everything, for a server that has forgotten the state."""
        return StatePrompt(self._scope, 0, self._transcript, save)

    def keep(self, state: int) -> None:
        """The server keeps everything said so far as `state`."""
        self.state, self._known, self._owns = state, len(self._transcript), True
