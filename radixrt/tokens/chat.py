"""Chat templates, rendered as transformers' apply_chat_template renders them."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes

from radixrt.checkpoint.files import are_templates
from radixrt.messages import ChatPrompt
from radixrt.tokens.environment import templates_environment
from radixrt.tokens.errors import FieldError, Unbounded
from radixrt.tokens.histories import first_lost, shaped, text_of
from radixrt.tokens.rewriting import (
    REASONING_KEYS,
    Message,
    functions_of,
    is_parsed,
    style_of,
    told_functions,
    values_in,
    ways,
    with_calls,
    with_tools,
)
from radixrt.tokens.special_text import Escaper
from radixrt.tokens.template_traits import TAKES_ALL, TemplateTraits, probe
from radixrt.tokens.tool_fields import with_fields
from radixrt.tokens.turns import Interrupted, Steps, finished, finished_within, in_one_step

NO_TEMPLATE = "this model has no chat template; give one with --chat-template FILE, or send a plain prompt"
CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "

MAX_CHARS = 1 << 26
"""The most characters that a template may write for a chat."""
MAX_ARGUMENTS = 1 << 20
"""The most values that the arguments of a chat's calls may hold together: a template gets all of them parsed."""
MAX_SECONDS = 10.0
"""The most processor time that it may take."""
PROBE_CHARS = 1 << 20
PROBE_SECONDS = 1.0
PROBE_BYTES = 512 << 20
"""The same for all the short chats with which it is probed, when it is loaded, and the memory that it may take
meanwhile."""
STEP_PIECES = 512
"""Pieces of text that a template writes in a step; there are about four for each message."""
STEP_MESSAGES = 512
QUOTED_CHARS = 40
"""So many characters of a message are quoted in an error."""

NO_CALLS: tuple[str, list[Any]] = ("tool_calls", [])
"""Some clients send this empty key; templates test only whether there is the key."""


def read_templates(folder: Path, config: Mapping[str, Any], file: str = "") -> dict[str, str]:
    """Jinja sources by name ("default", "tool_use", ...); {} if the checkpoint has none.

    In order: `file` (Jinja, or JSON with `chat_template`), chat_template.jinja (and
    additional_chat_templates/*.jinja), chat_template.json, `chat_template` of tokenizer_config.json.
    Raises ValueError if one cannot be read.
    """
    if file:
        return _from_file(Path(file))
    others = sorted(folder.glob("additional_chat_templates/*.jinja"))
    extra = {path.stem: template for path in others for template in _from_file(path).values()}
    if (folder / "chat_template.jinja").is_file():
        return extra | _from_file(folder / "chat_template.jinja")
    if extra:
        return extra
    if (folder / "chat_template.json").is_file():
        return _from_file(folder / "chat_template.json")
    return _by_name(config.get("chat_template"))


def _from_file(path: Path) -> dict[str, str]:
    try:
        text = path.read_text(encoding="utf-8")
        template = json.loads(text)["chat_template"] if path.suffix == ".json" else text
        if template is not None and not are_templates(template):
            raise ValueError("it is no text, and no list of templates by name")
        return _by_name(template)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"no chat template in {path}: {error}") from error


def _by_name(template: str | list[dict[str, str]] | dict[str, str] | None) -> dict[str, str]:
    if isinstance(template, list):
        return {item["name"]: item["template"] for item in template}
    if isinstance(template, dict):
        return template
    return {"default": template} if template else {}


class ChatTemplates:
    """A model's templates, compiled once; `special_tokens` (bos_token, ...) are variables in them."""

    def __init__(
        self, sources: Mapping[str, str], special_tokens: Mapping[str, str], escaper: Escaper | None = None
    ) -> None:
        self.escaper = escaper
        """Of the special tokens in messages; None if they are to be found there."""
        environment = templates_environment(escaper)
        self._templates = {name: _Template(environment, source) for name, source in sources.items()}
        self._special_tokens = dict(special_tokens)

    def check(self) -> None:
        """Probe what the templates take. Raises ValueError if one takes too long, or writes too much, for them."""
        for name, template in self._templates.items():
            try:
                for tools in (False, True):
                    probed = in_one_step(template.traits, tools, self._special_tokens)
                    finished_within(PROBE_SECONDS, PROBE_BYTES, probed)
            except (Unbounded, Interrupted) as error:
                problem = f"chat template {name!r} does not come to an end for a short chat"
                raise ValueError(f"{problem}: {error}") from None

    def shows_tools(self) -> bool:
        """Whether the template for chats with tools shows them. True if there is no template."""
        if not self._templates:
            return True
        return not self._choose(tools=True).traits(True, self._special_tokens).tools

    def render(self, prompt: ChatPrompt, answer_next: bool = True) -> str:
        """The text of a chat prompt, up to where the assistant's answer begins or, with `partial`, continues. Without
        `answer_next` it ends with the last message.

        Raises FieldError (`messages`, `messages[i]...`, `template_args`) if there is no template, if the input does not
        have the form of OpenAI's messages, or if the template refuses it.
        """
        return finished(self.steps(prompt, answer_next))

    def steps(self, prompt: ChatPrompt, answer_next: bool = True) -> Steps[str]:
        """`render` in steps."""
        template = self._choose(tools=prompt.tools is not None)
        reserved = {"messages", "tools", "documents", "add_generation_prompt"} & prompt.template_args.keys()
        if reserved:
            raise FieldError("template_args", f"template_args may not set {', '.join(sorted(reserved))}")
        messages: list[Message] = []
        values = 0
        for at in range(0, len(prompt.messages), STEP_MESSAGES):
            if at:
                yield None
            some = [_checked(i, one) for i, one in enumerate(prompt.messages[at : at + STEP_MESSAGES], at)]
            messages += map(self.escaper.message, some) if self.escaper and self.escaper.is_needed(some) else some
            values += sum(map(_argument_values, messages[at:]))
            if values > MAX_ARGUMENTS:
                raise FieldError("messages", f"messages: arguments of calls hold more than {MAX_ARGUMENTS} values")
        if not messages:
            raise FieldError("messages", "messages must hold at least one message")
        traits = template.traits(bool(prompt.tools), self._special_tokens)
        for at in range(0, len(messages), STEP_MESSAGES):
            if at:
                yield None
            some = messages[at : at + STEP_MESSAGES]
            messages[at : at + STEP_MESSAGES] = [template.adapted(i, one, traits) for i, one in enumerate(some, at)]
        if prompt.partial:
            _mark_end(messages)
        tools, given = prompt.tools, prompt.template_args
        if self.escaper and self.escaper.is_needed([tools, given]):
            tools, given = self.escaper.values(tools), self.escaper.values(given)
        tools = with_fields(tools, traits.tool_fields) if tools else tools
        variables = {**self._special_tokens, **given}

        def rendered(some: list[Message], answer_next: bool) -> Steps[str]:
            return template.steps(shaped(some, traits, tools, answer_next), tools, answer_next, variables)

        try:
            text = yield from rendered(messages, answer_next and not prompt.partial)
        except Unbounded:
            raise
        except FieldError as error:
            raise (yield from _named(error, messages, rendered)) from error
        yield None
        lost = None if traits is TAKES_ALL else (yield from first_lost(messages, text, traits))
        if lost is not None:
            raise _about(lost, messages[lost], "the chat template does not show it to the model")
        return _cut_at_mark(text) if prompt.partial else text

    def _choose(self, tools: bool) -> _Template:
        named = self._templates
        if not named:
            raise FieldError("messages", NO_TEMPLATE)
        template = (named.get("tool_use") if tools else None) or named.get("default")
        if template is None:
            raise FieldError("messages", f"none of the chat templates {sorted(named)} is the default; {NO_TEMPLATE}")
        return template


class _Template:
    """A compiled template, and what it expects of messages.

    takes_parts    it loops over `content`, so a list of parts is passed as it is; otherwise their texts are joined by
                   line feeds
    takes_objects  it handles objects as tool call `arguments`, or writes them as JSON and does not handle strings
                   separately, so OpenAI's JSON string is parsed for it
    takes_thoughts it tests whether a part is one of thoughts, so these are a part of the content, before its text
    takes_none     it tests whether `content` is none, and never takes its length, so `content` is none in an answer
                   with only tool calls; otherwise it is "" there. In all other messages keys with None are left out

    Two families have no variable `tools`: SmolLM3's template has `xml_tools`, Phi-4-mini's expects them in the system
    message. If a template mentions tool calls but does not write those of messages, they are inserted as text.
    """

    def __init__(self, environment: jinja2.Environment, source: str) -> None:
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template, line {error.lineno}: {error.message}") from error
        except (RecursionError, MemoryError):
            raise ValueError("chat template: it is nested too deeply") from None
        self.takes_parts = any(_is_named(loop.iter, "content") for loop in tree.find_all(nodes.For))
        sets = (node for node in tree.find_all(nodes.Assign) if _is_named(_first(node.node), "arguments"))
        names = {"arguments", *(node.target.name for node in sets if isinstance(node.target, nodes.Name))}
        uses = {_use(node, names) for node in tree.find_all((nodes.Filter, nodes.Getattr, nodes.Test))}
        whole = _mentions(tree, "tool_calls") and not _mentions(tree, "arguments")
        writes = bool(uses & {"tojson", "items"}) and "is string" not in uses
        self.takes_objects = whole or "is mapping" in uses or writes
        uses = {_use(node, ("content",)) for node in tree.find_all((nodes.Filter, nodes.Test))}
        self.takes_none = "is none" in uses and "length" not in uses
        self.takes_thoughts = any(map(_looks_for_thoughts, tree.find_all(nodes.Compare)))
        variables = {name.name for name in tree.find_all(nodes.Name)}
        self._calls_style = None if _mentions(tree, "tool_calls") else style_of(source)
        self._xml_tools = "xml_tools" in variables and "tools" not in variables
        self._told_functions = {"functions", "datetime"} & variables if "tools" not in variables else set()
        self._traits: dict[bool, TemplateTraits] = {}
        self._no_tools: list[Any] | None = None
        """`tools` in a chat without any: some templates loop over them without a test."""
        self._tools_in_system = _mentions(tree, "tools") and "tools" not in variables

    def traits(self, tools: bool, special_tokens: Mapping[str, str]) -> TemplateTraits:
        """What the template takes in chats with or without tools; probed once. Raises Unbounded."""
        if tools not in self._traits:

            def render(messages: list[Message], some: list[Any] | None, answer_next: bool) -> str:
                adapted = [self.adapted(i, message, TAKES_ALL) for i, message in enumerate(messages)]
                return finished(self.steps(adapted, some, answer_next, special_tokens, PROBE_CHARS))

            found = probe(render, tools)
            if found is TAKES_ALL and not tools:
                self._no_tools = []
                found = probe(render, tools)
                self._no_tools = None if found is TAKES_ALL else []
            self._traits[tools] = found
        return self._traits[tools]

    def adapted(self, index: int, message: Message, traits: TemplateTraits) -> Message:
        """A message as the template expects it: no None values except `content`, parts and arguments in its form."""
        message = {key: value for key, value in message.items() if value is not None and (key, value) != NO_CALLS}
        if message["role"] == "developer":
            message["role"] = "system"
        if message["role"] == "assistant" and not message.get("content"):
            message["content"] = None if self.takes_none and message.get("tool_calls") else ""
        if isinstance(message.get("content"), list):
            texts = [_part_text(index, j, part) for j, part in enumerate(message["content"])]
            # Most templates that loop over a user message's parts write a result for each part of a tool message, or
            # print the list.
            if not texts or not self.takes_parts or message["role"] not in traits.parts:
                message["content"] = "\n".join(texts)
        if self._calls_style and message.get("tool_calls") and isinstance(message["content"], str):
            message = with_calls(message, self._calls_style)
        if message.get("tool_calls"):
            message["tool_calls"] = [_with_arguments(call, self.takes_objects) for call in message["tool_calls"]]
        reasoning = next((message[key] for key in REASONING_KEYS if key in message), None)
        if reasoning is not None:  # templates read it under one name or the other
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        if reasoning and self.takes_thoughts and "assistant" in traits.parts:
            message["content"] = [{"type": "thinking", "thinking": reasoning}, *_parts(message["content"])]
        return message

    def steps(
        self,
        messages: list[Message],
        tools: list[Message] | None,
        answer_next: bool,
        variables: Mapping[str, Any],
        max_chars: int | None = None,
    ) -> Steps[str]:
        """Render the chat in the first of the `ways` that the template does not refuse. If it refuses all, raises
        FieldError with its reason for the unchanged chat; Unbounded if it does not come to an end."""
        if tools and self._xml_tools and not {"xml_tools", "python_tools"} & variables.keys():
            variables = {**variables, "xml_tools": functions_of(tools)}
        if self._told_functions:
            variables = told_functions(tools or []) | dict(variables)
        if tools and self._tools_in_system:
            messages = with_tools(messages, tools)
        limits = _Limits(MAX_CHARS if max_chars is None else max_chars)
        refusal = None
        for way in ways(messages):
            try:
                return (yield from self._rendered(way, tools, answer_next, variables, limits))
            except Unbounded:
                raise
            except FieldError as error:
                refusal = refusal or error
            yield None
        try:
            raise refusal  # type: ignore[misc]
        finally:
            del refusal  # breaks a reference cycle with this frame

    def _rendered(
        self,
        messages: list[Message],
        tools: list[Message] | None,
        answer_next: bool,
        variables: Mapping[str, Any],
        limits: _Limits,
    ) -> Steps[str]:
        written: list[str] = []
        try:
            given = {"messages": messages, "tools": tools or self._no_tools, "documents": None}
            context = self._template.new_context(given | {"add_generation_prompt": answer_next} | dict(variables))
            pieces = self._template.root_render_func(context)
            while True:
                block = list(itertools.islice(pieces, STEP_PIECES))
                written.append("".join(block))
                limits.take(len(written[-1]))
                if len(block) < STEP_PIECES:
                    return "".join(written)
                limits.pause()
                yield None
                limits.go_on()
        except jinja2.TemplateError as error:  # raise_exception and undefined variables
            raise FieldError("messages", f"the chat template refuses these messages: {error.message}") from error
        except Unbounded:
            raise
        except Exception as error:  # a template may fail in any way on an unexpected message
            raise FieldError("messages", f"the chat template fails on these messages: {error}") from error


class _Limits:
    """What a template may still write, in characters, and take, in seconds."""

    __slots__ = ("_began", "_chars", "_max_chars", "_seconds")

    def __init__(self, max_chars: int) -> None:
        self._chars, self._max_chars, self._seconds = 0, max_chars, 0.0
        self._began: float | None = None
        """The thread's processor time when the current step began; None in the first, which is not counted."""

    def take(self, chars: int) -> None:
        self._chars += chars
        if self._chars > self._max_chars:
            raise Unbounded(f"writes more than {self._max_chars} characters")

    def pause(self) -> None:
        """A step has ended."""
        if self._began is not None:
            self._seconds += time.thread_time() - self._began
        if self._seconds > MAX_SECONDS:
            raise Unbounded(f"takes more than {MAX_SECONDS:g} s")

    def go_on(self) -> None:
        """The next step begins, maybe in another thread."""
        self._began = time.thread_time()


def _use(node: nodes.Node, names: Collection[str]) -> str | None:
    """How an expression uses a variable or attribute with one of these names: the name of a filter or attribute, or
    "is" and that of a test. None if it does not."""
    if not isinstance(node, nodes.Filter | nodes.Getattr | nodes.Test):
        return None
    if not any(_is_named(node.node, name) for name in names):
        return None
    match node:
        case nodes.Getattr():
            return node.attr
        case nodes.Test():
            return f"is {node.name}"
    return node.name


def _looks_for_thoughts(node: nodes.Compare) -> bool:
    """Whether it is `part.type == 'thinking'`."""
    looked_for = (one.expr.value for one in node.ops if one.op == "eq" and isinstance(one.expr, nodes.Const))
    return _is_named(node.expr, "type") and "thinking" in looked_for


def _first(node: nodes.Node) -> nodes.Node:
    """The first operand of `or`: `x` of `x or {}`; any other expression itself."""
    return node.left if isinstance(node, nodes.Or) else node


def _mentions(tree: nodes.Template, name: str) -> bool:
    """Whether a template anywhere reads `x.name`, `x['name']` or `x.get('name')`, or tests for the name."""
    constants = any(constant.value == name for constant in tree.find_all(nodes.Const))
    return constants or any(node.attr == name for node in tree.find_all(nodes.Getattr))


def _is_named(node: nodes.Node | None, name: str) -> bool:
    """Whether an expression is `name`, `x.name` or `x['name']`, filters aside."""
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    match node:
        case nodes.Name():
            return node.name == name
        case nodes.Getattr():
            return node.attr == name
        case nodes.Getitem():
            return isinstance(node.arg, nodes.Const) and node.arg.value == name
    return False


# ---------------------------------------------------------------- messages


def _named(
    error: FieldError, messages: list[Message], rendered: Callable[[list[Message], bool], Steps[str]]
) -> Steps[FieldError]:
    """The error for refused messages, with the first one with which the template refuses those up to it."""
    least, most = 1, len(messages)  # it is the last of so many
    began = time.monotonic()
    while least < most and time.monotonic() - began < MAX_SECONDS:
        yield None
        middle = (least + most) // 2
        try:
            yield from rendered(messages[:middle], False)
            least = middle + 1
        except FieldError:
            most = middle
    return _about(most - 1, messages[most - 1], str(error))


def _about(index: int, message: Message, problem: str) -> FieldError:
    """The error for a message, which is quoted as well: a front end may have made it of others."""
    quoted = f"{message['role']}: {text_of(message)[:QUOTED_CHARS]!r}"
    return FieldError(f"messages[{index}]", f"messages[{index}]: {problem} ({quoted})")


def _checked(index: int, message: Any) -> Message:
    field = f"messages[{index}]"
    if not isinstance(message, dict):
        raise FieldError(field, f"{field} must be an object with a role and content")
    if not isinstance(message.get("role"), str):
        raise FieldError(f"{field}.role", f"{field}.role must be a string")
    if not isinstance(message.get("content", ""), str | list | None):
        raise FieldError(f"{field}.content", f"{field}.content must be a string or a list of parts")
    if not isinstance(message.get("tool_calls", []), list | None):
        raise FieldError(f"{field}.tool_calls", f"{field}.tool_calls must be a list")
    return message


def _parts(content: str | list[Any] | None) -> list[Any]:
    """A content as parts, none of which is empty."""
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def _part_text(index: int, position: int, part: Any) -> str:
    field = f"messages[{index}].content[{position}]"
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise FieldError(f"{field}.type", f"{field}.type must be 'text', not {kind!r}: this model reads text only")
    if not isinstance(part.get("text"), str):
        raise FieldError(f"{field}.text", f"{field}.text must be a string")
    return part["text"]


def _argument_values(message: Message) -> int:
    """The most values that the arguments of a message's calls hold."""
    functions = (call.get("function") for call in message.get("tool_calls") or () if isinstance(call, dict))
    given = (function.get("arguments") for function in functions if isinstance(function, dict))
    return sum(values_in(arguments) for arguments in given if isinstance(arguments, str))


def _with_arguments(call: Any, parsed: bool) -> Any:
    """A tool call with `function.arguments`, an empty object if there are none; `parsed` if they are a JSON object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if arguments is None or (isinstance(arguments, str) and arguments.strip() in ("", "null" if parsed else "")):
        return {**call, "function": {**function, "arguments": {} if parsed else "{}"}}
    if not parsed or not isinstance(arguments, str) or not is_parsed(arguments):
        return call
    try:
        found = json.loads(arguments)
        if "\\u" in arguments:
            json.dumps(found, ensure_ascii=False).encode()  # raises UnicodeEncodeError for lone surrogates
    except (ValueError, RecursionError):
        return call  # a model need not have written valid JSON: the template gets the string
    return {**call, "function": {**function, "arguments": found}} if isinstance(found, dict) else call


def _mark_end(messages: list[Message]) -> None:
    """Mark the end of the last message, so that what the template writes after it can be cut off."""
    last = messages[-1]
    content = last.get("content")
    if last["role"] != "assistant" or not content or (isinstance(content, list) and "text" not in content[-1]):
        raise FieldError("messages", "only an assistant message with content can be continued, and it must be last")
    if isinstance(last["content"], str):
        last["content"] += CONTINUE_MARK
    else:
        *parts, part = last["content"]
        last["content"] = [*parts, {**part, "text": part["text"] + CONTINUE_MARK}]


def _cut_at_mark(text: str) -> str:
    at = text.rfind(CONTINUE_MARK.strip())
    if at < 0:
        raise FieldError("messages", "the chat template drops the message that should be continued")
    # If the template trims messages, the mark has lost its white space, and the text before it has to lose it, too.
    return text[:at] if text.startswith(CONTINUE_MARK, at) else text[:at].rstrip()
