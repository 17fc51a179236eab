"""What a branch has said: what of it the server knows already, by the number of a state, and what it does not."""

from __future__ import annotations

from radixrt.client import Completion
from radixrt.messages import (
    Said,
    SaidAnswer,
    SaidChoice,
    SaidMessage,
    SaidText,
    Sampling,
    StatePrompt,
    TurnBegins,
    TurnEnds,
)


class History:
    """All that was said, in order. The server makes prompts of it (`radixrt.router.said`) and keeps them as states;
    a request names the latest one and brings what was said since. Here all of it is kept too, for a server that has
    forgotten.

        said   text  answer  text  message ...
               ----- state -----  -- new ---
    """

    __slots__ = ("_known", "_open", "_owns", "_roles", "_said", "_scope", "state")

    def __init__(self, scope: str) -> None:
        self.state = 0
        """The latest that the server keeps; 0: nothing."""
        self._scope = scope
        self._said: list[Said] = []
        self._known = 0
        """So much of it is in the state."""
        self._owns = False
        """No other branch goes on from the state."""
        self._roles: bool | None = None
        """Whether this is a chat; None if nothing was said."""
        self._open = False
        """The assistant's message goes on."""

    def copy(self) -> History:
        """For a fork: what was said is shared, and the state."""
        other = History(self._scope)
        other._said, other._known, other.state = self._said.copy(), self._known, self.state
        other._roles, other._open = self._roles, self._open
        self._owns = False
        return other

    @property
    def said(self) -> list[Said]:
        """All of it."""
        return self._said

    @property
    def has_roles(self) -> bool:
        return bool(self._roles)

    def messages(self) -> list[dict[str, str]]:
        """`role` and `content` of each message, the open one included. ValueError in a program without roles."""
        if self._roles is False:
            raise ValueError("messages, in a program without roles: it has text")
        found: list[dict[str, str]] = []
        for one in self._said:
            match one:
                case SaidMessage(role, content):
                    found.append({"role": role, "content": content})
                case TurnBegins():
                    found.append({"role": "assistant", "content": ""})
                case SaidText(text=text) | SaidChoice(text=text) | SaidAnswer(text=text):
                    found[-1]["content"] += text
        return found

    def text(self) -> str:
        """All text. ValueError in a program with roles."""
        if self._roles:
            raise ValueError("text, in a program with roles: it has messages")
        return "".join(one.text for one in self._said)

    # ------------------------------------------------------------ growing

    def say(self, text: str) -> None:
        """Text of the open message, or of a program without roles. ValueError between the messages of a chat."""
        if not text:
            return
        if self._roles and not self._open:
            raise ValueError("text outside of a role, in a program that uses roles")
        self._roles = self._open
        if len(self._said) > self._known and isinstance(last := self._said[-1], SaidText):
            self._said[-1] = SaidText(last.text + text)
        else:
            self._said.append(SaidText(text))

    def add_message(self, role: str, content: str) -> None:
        """A whole message. ValueError in a program that began without roles."""
        self._begin_chat()
        self._said.append(SaidMessage(role, content))

    def open_message(self) -> None:
        """The assistant begins to speak."""
        self._begin_chat()
        self._open = True
        self._said.append(TurnBegins())

    def close_message(self) -> None:
        """The assistant has finished."""
        self._open = False
        self._said.append(TurnEnds())

    def _begin_chat(self) -> None:
        if self._roles is False:
            raise ValueError("a role, in a program that began with text outside of roles")
        self._roles = True

    def add_answer(self, done: Completion, sampling: Sampling, state: int) -> None:
        """What was generated; the server keeps it as `state`."""
        self._roles = self._open
        self._said.append(SaidAnswer(done.ids, done.text, done.stop, sampling))
        self.keep(state)

    def add_choice(self, text: str, state: int) -> None:
        """A text that was selected; the server keeps what was said before it as `state`."""
        self.keep(state)
        self._roles = self._open
        self._said.append(SaidChoice(text))

    # ------------------------------------------------------------ as a prompt

    def prompt(self, save: int, resumes: bool = False) -> StatePrompt:
        """What is new since the state, to be kept as `save`."""
        return StatePrompt(self._scope, self.state, self._said[self._known :], save, self._owns, resumes)

    def whole(self, save: int) -> StatePrompt:
        """Everything, for a server that does not know the state any more."""
        return StatePrompt(self._scope, 0, self._said, save)

    def keep(self, state: int) -> None:
        """The server knows all that was said."""
        self.state, self._known, self._owns = state, len(self._said), True
