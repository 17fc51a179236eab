"""A model that generates given texts: a fake runner, and chat templates of many model families."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from radixrt.formats.parsing import Piece
from radixrt.formats.parsing.pieces import CallStart
from radixrt.messages import ChatPrompt, Generate, Sampling
from radixrt.messages.ranks import RequestInfo
from radixrt.tokens import Encoded, load_tokenizer
from radixrt.worker import setup
from radixrt.worker.execution.fake_runner import EOS, FakeRunner
from radixrt.worker.plan import Plan, Result
from tests.checkpoints import make_tokenizer
from tests.frontend.conftest import serving

_TOOLS = "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
_TURN = "<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
_END = "<|im_end|>\n"
_NEXT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

HERMES = (
    _TOOLS + "{% for m in messages %}" + _TURN + "{% for call in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}" + _END + "{% endfor %}" + _NEXT
)
THINKING = HERMES.replace(
    "{{ m.content",
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content",
).replace(_NEXT, _NEXT + "{% if opens %}<think>\n{% endif %}{% if closes %}<think>\n\n</think>\n\n{% endif %}")
LLAMA = (
    _TOOLS + "{% for m in messages %}" + _TURN + "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% endif %}' + _END + "{% endfor %}" + _NEXT
)
MISTRAL = (
    _TOOLS + "{% for m in messages %}[INST]{{ m.content or '' }}[/INST]{% if m.tool_calls %}[TOOL_CALLS] ["
    "{% for call in m.tool_calls %}{% if call.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}{% endfor %}"
)
MISTRAL_V11 = (
    "{% if tools %}" + _TOOLS + "{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{% if call.id | length != 9 %}{{ raise_exception('nine characters') }}"
    "{% endif %}[TOOL_CALLS]{{ call.function.name }}[CALL_ID]{{ call.id }}[ARGS]{{ call.function.arguments | tojson }}"
    "{% endfor %}<|im_end|>{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{{ m.content }}"
    "[/TOOL_RESULTS]{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}"
)
_DEEPSEEK = (
    "{% if tools %}" + _TOOLS + "{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}<｜Assistant｜>"
    "{{ m.content or '' }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>{% for call in m.tool_calls %}CALL{% endfor %}"
    "<｜tool▁calls▁end｜>{% endif %}<|im_end|>{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}"
    "<｜tool▁output▁end｜>{% else %}<｜User｜>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
_F, _ARGUMENTS = "{{ call.function.name }}", "{{ call.function.arguments | tojson }}"
DEEPSEEK = _DEEPSEEK.replace("CALL", f"<｜tool▁call▁begin｜>{_F}<｜tool▁sep｜>{_ARGUMENTS}<｜tool▁call▁end｜>")
DEEPSEEK_V3 = _DEEPSEEK.replace(
    "CALL",
    "{% if not loop.first %}\n{% endif %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
    f"{_F}\n```json\n{_ARGUMENTS}\n```<｜tool▁call▁end｜>",
)
DEEPSEEK_MARKS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
KIMI = (
    _TOOLS + "{% for m in messages %}" + _TURN + "{% if m.tool_calls %}<|tool_calls_section_begin|>"
    "{% for call in m.tool_calls %}<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>"
    + _ARGUMENTS
    + "<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}"
    + _END
    + "{% endfor %}"
    + _NEXT
)
QWEN_CODER = (
    _TOOLS + "{% for m in messages %}" + _TURN + "{% for call in m.tool_calls or [] %}\n<tool_call>\n"
    "<function={{ call.function.name }}>\n{% for name, value in call.function.arguments | items %}"
    "<parameter={{ name }}>\n{{ value | tojson if value is mapping or value is sequence and value is not string "
    "else value | string }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
    + _END
    + "{% endfor %}"
    + _NEXT
)
SEED = QWEN_CODER.replace("tool_call>\n", "seed:tool_call>\n").replace("</tool_call>", "</seed:tool_call>")
SEED = SEED.replace("<parameter={{ name }}>\n", "<parameter={{ name }}>").replace("\n</parameter>", "</parameter>")
_VALUE = "{{ value | tojson if value is not string else value }}"
GLM = (
    _TOOLS + "{% for m in messages %}" + _TURN + "{% for call in m.tool_calls or [] %}\n<tool_call>"
    "{{ call.function.name }}\n{% for name, value in call.function.arguments | items %}"
    "<arg_key>{{ name }}</arg_key>\n<arg_value>"
    + _VALUE
    + "</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
    + _END
    + "{% endfor %}"
    + _NEXT
)
GLM_47 = GLM.replace("{{ call.function.name }}\n", "{{ call.function.name }}")
GLM_47 = GLM_47.replace("</arg_key>\n", "</arg_key>").replace("</arg_value>\n", "</arg_value>")
MINIMAX = (
    _TOOLS
    + "{% for m in messages %}"
    + _TURN
    + "{% if m.tool_calls %}\n<minimax:tool_call>\n{% for call in m.tool_calls %}"
    '<invoke name="{{ call.function.name }}">\n{% for name, value in call.function.arguments | items %}'
    '<parameter name="{{ name }}">'
    + _VALUE
    + "</parameter>\n{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>{% endif %}"
    + _END
    + "{% endfor %}"
    + _NEXT
)
_QUOTED = "{{ 'true' if value is string else 'false' }}"
DSML = (
    _TOOLS
    + "{% for m in messages %}"
    + _TURN
    + "{% if m.tool_calls %}\n\n<｜DSML｜function_calls>\n{% for call in m.tool_calls %}"
    '<｜DSML｜invoke name="{{ call.function.name }}">\n{% for name, value in call.function.arguments | items %}'
    '<｜DSML｜parameter name="{{ name }}" string="'
    + _QUOTED
    + '">'
    + _VALUE
    + "</｜DSML｜parameter>\n{% endfor %}</｜DSML｜invoke>\n{% endfor %}</｜DSML｜function_calls>{% endif %}"
    + _END
    + "{% endfor %}"
    + _NEXT
)
OLMO = (
    "{% if tools %}Output any function calls within <function_calls></function_calls> XML tags."
    + _TOOLS
    + "{% endif %}"
    "{% for m in messages %}" + _TURN + "{% if m.tool_calls %}<function_calls>{% for call in m.tool_calls %}"
    "{{ call.function.name }}({% for name, value in call.function.arguments.items() %}{{ name }}={{ value | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %}){{ '\n' if not loop.last }}{% endfor %}</function_calls>{% endif %}"
    + _END
    + "{% endfor %}"
    + _NEXT
)
GRANITE = (
    "{% if tools %}Answer only with <|tool_call|> followed by a JSON list of tools used.\n" + _TOOLS + "{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}" + _NEXT
)
PHI = (
    "{% for m in messages %}{% if m['role'] == 'system' and 'tools' in m and m['tools'] is not none %}"
    "{{ '<|im_start|>system\n' + m['content'] + '<|tool|>' + m['tools'] + '<|/tool|>' + '<|im_end|>\n' }}{% else %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}" + _NEXT
)
GEMMA = (
    _TOOLS + "{% for m in messages %}" + _TURN + "{% for call in m.tool_calls or [] %}<|tool_call>call:"
    "{{ call.function.name }}{{ '{' }}{% for name, value in call.function.arguments | items %}{{ name }}:"
    "{% if value is string %}<|\"|>{{ value }}<|\"|>{% else %}{{ value | tojson }}{% endif %}{{ ',' if not loop.last }}"
    "{% endfor %}{{ '}' }}<tool_call|>{% endfor %}" + _END + "{% endfor %}" + _NEXT
)
GEMMA_MARKS = ("<|tool_call>", "<tool_call|>", '<|"|>')
SOLAR = (
    _TOOLS
    + "{% for m in messages %}<|begin|>{{ m.role }}{% if m.tool_calls %}<|tool_calls|>{% for call in m.tool_calls %}"
    f"<|tool_call:begin|>{{{{ call.id }}}}<|tool_call:name|>{_F}<|tool_call:args|>{_ARGUMENTS}<|tool_call:end|>"
    "{% endfor %}<|calls|>{% else %}<|content|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant{% endif %}"
)
COHERE = (
    _TOOLS + "{% for m in messages %}" + _TURN + "{% if m.tool_calls %}<|START_ACTION|>[{% for call in m.tool_calls %}"
    f'{{{{ "{{" }}}}"tool_call_id": "{{{{ loop.index0 }}}}", "tool_name": "{_F}", '
    f'"parameters": {_ARGUMENTS}{{{{ "}}" }}}}'
    "{{ ', ' if not loop.last }}{% endfor %}]<|END_ACTION|>{% endif %}" + _END + "{% endfor %}" + _NEXT
)
COHERE_MARKS = ("<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>")
APERTUS = (
    _TOOLS + "{% for m in messages %}" + _TURN + "{% if m.tool_calls %}<|tools_prefix|>[{% for call in m.tool_calls %}"
    f'{{{{ "{{" }}}}"{_F}": {_ARGUMENTS}{{{{ "}}" }}}}'
    "{{ ', ' if not loop.last }}{% endfor %}]<|tools_suffix|>{% endif %}" + _END + "{% endfor %}" + _NEXT
)
LFM2 = (
    "{% if tools %}List of tools: ["
    + _TOOLS
    + "]{% endif %}{% for m in messages %}"
    + _TURN
    + _END
    + "{% endfor %}"
    + _NEXT
)
HUNYUAN = GLM.replace("\n<tool_call>", "<tool_call>").replace(
    "{{ call.function.name }}\n", "{{ call.function.name }}<tool_sep>\n"
)
HUNYUAN = HUNYUAN.replace("{% for call", "{% if m.tool_calls %}<tool_calls>\n{% endif %}{% for call").replace(
    "</tool_call>{% endfor %}", "</tool_call>\n{% endfor %}{% if m.tool_calls %}</tool_calls>{% endif %}"
)
GLM_MARKS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
MINIMAX_MARKS = ("<minimax:tool_call>", "</minimax:tool_call>")
KIMI_MARKS = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
HARMONY = (
    "<|start|>system<|message|>Valid channels: analysis, commentary, final.<|end|>"
    "{% if tools %}<|start|>developer<|message|>" + _TOOLS + "<|end|>{% endif %}"
    "{% set last = namespace(name='') %}{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}"
    "{% if m.content and m.thinking %}{{ raise_exception('text and thoughts') }}{% endif %}"
    "{% set f = m.tool_calls[0].function %}{% set last.name = f.name %}{% set later = namespace(final=false) %}"
    "{% for o in messages[loop.index:] %}{% if o.role == 'assistant' and not o.tool_calls %}"
    "{% set later.final = true %}{% endif %}{% endfor %}{% if (m.content or m.thinking) and not later.final %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.content or m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
    "{{ f.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% elif m.role == 'tool' %}{% if not last.name %}{{ raise_exception('a result of no call') }}{% endif %}"
    "<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""Like gpt-oss' template: thinking is kept while tools are called, and dropped after the final answer."""
MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
FAMILIES = {
    "harmony": (HARMONY, MARKS),
    "plain": ("", ()),
    "hermes": (HERMES, ()),
    "thinking": (THINKING, ()),
    "llama": (LLAMA, ("<|python_tag|>",)),
    "mistral": (MISTRAL, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
    "mistral_v11": (MISTRAL_V11, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[TOOL_CONTENT]")),
    "deepseek": (DEEPSEEK, DEEPSEEK_MARKS),
    "deepseek_v3": (DEEPSEEK_V3, DEEPSEEK_MARKS),
    "kimi": (KIMI, KIMI_MARKS),
    "qwen_coder": (QWEN_CODER, ()),
    "glm": (GLM, GLM_MARKS),
    "glm47": (GLM_47, ()),
    "minimax": (MINIMAX, MINIMAX_MARKS),
    "dsml": (DSML, ("｜DSML｜",)),
    "olmo": (OLMO, ()),
    "granite": (GRANITE, ("<|tool_call|>",)),
    "phi": (PHI, ("<|tool|>", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>")),
    "gemma": (GEMMA, GEMMA_MARKS),
    "solar": (SOLAR, ("<|begin|>", "<|content|>", "<|end|>", "<|tool_calls|>", "<|calls|>", "<|tool_call:begin|>")),
    "cohere": (COHERE, COHERE_MARKS),
    "apertus": (APERTUS, ("<|tools_prefix|>", "<|tools_suffix|>")),
    "lfm2": (LFM2, ("<|tool_call_start|>", "<|tool_call_end|>")),
    "hunyuan": (HUNYUAN, ()),
    "seed": (SEED, ("<seed:tool_call>", "</seed:tool_call>")),
}
"""Chat template, and special tokens in addition to those of the test tokenizer."""


def make_family(folder: Path, family: str) -> Path:
    return make_chat(folder, *FAMILIES[family])


def make_chat(folder: Path, template: str, specials: tuple[str, ...]) -> Path:
    """Write a tokenizer with this chat template ("": the test tokenizer's own) and further special tokens."""
    make_tokenizer(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    if template:
        config["chat_template"] = template
    config["added_tokens_decoder"] = {str(512 + i): {"content": s, "special": True} for i, s in enumerate(specials)}
    path.write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 512 + len(specials)}))
    return folder


class Script(FakeRunner):
    """A runner in which each sequence generates the next one of `texts`, then EOS. Without a text left, it behaves as
    FakeRunner."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.texts: deque[list[int]] = deque()
        self.samplings: list[Sampling] = []
        self.cached: list[int] = []
        """Tokens of each sequence, in order, that were not computed for it."""
        self._began: set[int] = set()
        self._said: dict[int, list[int] | None] = {}

    def launch(self, plan: Plan) -> Callable[[], Result]:
        wait = super().launch(plan)
        for b, request in enumerate(plan.requests):
            if request.id not in self._began:
                self._began.add(request.id)
                self.cached.append(int(plan.starts[b]))

        def finish() -> Result:
            result = wait()
            for b, request in enumerate(plan.requests):
                at = int(plan.starts[b] + plan.counts[b]) - request.prompt_len
                if at >= 0 and (said := self._script(request)) is not None:
                    result.tokens[b] = said[at] if at < len(said) else EOS
                    if result.logprobs:
                        result.logprobs[b] = self._logprob(request, result.tokens[b])
            return result

        return finish

    def _script(self, request: RequestInfo) -> list[int] | None:
        if request.id not in self._said:
            self._said[request.id] = self.texts.popleft() if self.texts else None
            self.samplings.append(request.sampling)
        return self._said[request.id]


class Model:
    """A server with a scripted model, and OpenAI's client for it."""

    def __init__(self, url: str, folder: Path, script: Script, frontend: Any) -> None:
        self.url = url
        self.router = frontend.config.router
        self.script = script
        self.tokenizer = load_tokenizer(folder)
        self.client = openai.OpenAI(base_url=url + "/v1", api_key="any", max_retries=0)
        self.answers: list[tuple[Generate, ChatPrompt, dict, list[int]]] = []
        self.routes: set[str] = set()
        """By which it was asked."""
        self.attach(frontend)

    def attach(self, frontend: Any) -> None:
        """Record the answers of a front end."""
        remember, answer = frontend.generation.on_answer, frontend.generation.answer

        async def noting(request: Any, *args: Any) -> Any:
            self.routes.add(request.url.path)
            return await answer(request, *args)

        def on_answer(request: Generate, prompt: ChatPrompt, encoded: Encoded, message: dict, ids: bytes) -> None:
            self.answers.append((request, prompt, message, memoryview(ids).cast("i").tolist()))
            remember(request, prompt, encoded, message, ids)

        frontend.generation.on_answer, frontend.generation.answer = on_answer, noting

    def says(self, *texts: str) -> None:
        """Set the texts that the model generates next."""
        self.script.texts = deque(self.tokenizer.encode(text, False) for text in texts)
        self.script.samplings.clear()
        self.script.cached.clear()
        self.answers.clear()
        self.routes.clear()

    def chat(self, *texts: str, messages: list | None = None, **fields: Any) -> Any:
        """The client's response if the model generates `texts`."""
        self.says(*texts)
        messages = messages or [{"role": "user", "content": "hello"}]
        return self.client.chat.completions.create(**({"model": "m", "messages": messages} | fields))

    @property
    def grammar(self) -> Any:
        """The grammar that reached the worker, its text decoded if it is JSON."""
        (sampling,) = {id(s.grammar): s for s in self.script.samplings}.values()
        if sampling.grammar is None or sampling.grammar.kind in ("regex", "ebnf"):
            return sampling.grammar
        return sampling.grammar.kind, json.loads(sampling.grammar.text)


@contextmanager
def scripted(family: str, folder: Path, num_pages: int = 1 << 16, **settings: Any) -> Iterator[Model]:
    make_family(folder, family)
    with scripted_chat(folder, num_pages=num_pages, **settings) as model:
        yield model


@contextmanager
def scripted_chat(
    folder: Path, ends: tuple[str, ...] = (), num_pages: int = 1 << 16, **settings: Any
) -> Iterator[Model]:
    """A model of the folder's tokenizer and template, whose answers end also with the special tokens `ends`."""
    script = Script(vocab_size=json.loads((folder / "config.json").read_text())["vocab_size"], num_pages=num_pages)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "make_runner", lambda config: script)
        # The script contains all tokens.
        with serving(folder, workers=1, jump_forward=False, **settings) as frontend:
            model = Model(frontend.url, folder, script, frontend._server._frontend)
            model.router_thread = frontend.router_thread
            script.eos_ids |= {model.tokenizer.token_id(end) for end in ends}
            with model.client:
                yield model


def joined(pieces: list[Piece]) -> list[Piece]:
    """Merge consecutive pieces of the same kind."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        same = type(last) is type(piece) and not isinstance(piece, CallStart)
        if same and getattr(last, "index", 0) == getattr(piece, "index", 0):
            fields = {name: getattr(piece, name) for name in piece.__struct_fields__}
            found[-1] = type(piece)(**fields | {"text": last.text + piece.text})
        else:
            found.append(piece)
    return found


def gathered(stream: Any) -> tuple[dict[int, dict], dict[int, str]]:
    """Collect a stream. Returns (messages by choice, finish reasons by choice)."""
    messages: dict[int, dict] = {}
    ends: dict[int, str] = {}
    for chunk in stream:
        for choice in chunk.choices:
            message = messages.setdefault(choice.index, {"content": "", "reasoning_content": "", "tool_calls": []})
            delta = choice.delta
            message["content"] += delta.content or ""
            message["reasoning_content"] += getattr(delta, "reasoning_content", None) or ""
            for part in delta.tool_calls or []:
                calls = message["tool_calls"]
                if part.index == len(calls):
                    assert part.id and part.type == "function" and part.function.name
                    assert part.function.arguments == ""
                    calls.append([part.id, part.function.name, ""])
                else:
                    assert part.index == len(calls) - 1 and part.id is None and part.function.arguments
                    calls[-1][2] += part.function.arguments
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    return messages, ends
