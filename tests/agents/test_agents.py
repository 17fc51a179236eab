"""Command-line agents from npm, unmodified: each does a task with a scripted model behind published chat templates, and
every turn hits all that was computed before it.

`make test-agents` installs them. An agent has a home of its own, no keys, and no network but this server.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.frontend.scripted import KIMI_MARKS, MARKS, Model, make_chat, scripted_chat

pytestmark = pytest.mark.agents
FOLDER = Path(os.environ.get("AGENTS_FOLDER") or Path(__file__).parents[2] / ".agents")
TASK, MORE = "Create hello.txt that says hello, and show it.", "Show it again."
SECONDS = 100
"""For one run of an agent."""


# ---------------------------------------------------------------- models


class Format(NamedTuple):
    """How a family writes an answer: its special tokens, those that end an answer, the text of a call (name, arguments,
    number of the call in the chat) and of a last word, and whether these begin with thoughts."""

    specials: tuple[str, ...]
    ends: tuple[str, ...]
    call: Callable[[str, dict[str, str], int], str]
    done: str
    thinks: bool = False


def qwen_call(name: str, arguments: dict[str, str], number: int) -> str:
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"I call it.\n<tool_call>\n<function={name}>\n{values}</function>\n</tool_call><|im_end|>"


def harmony_call(name: str, arguments: dict[str, str], number: int) -> str:
    thought = "<|channel|>analysis<|message|>It wants a call.<|end|><|start|>assistant"
    said = "<|channel|>commentary<|message|>I call it.<|end|><|start|>assistant"
    header = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return f"{thought}{said}{header}{json.dumps(arguments)}<|call|>"


def glm_call(name: str, arguments: dict[str, str], number: int) -> str:
    pairs = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments.items())
    return f"\n<think>I call it.</think>\n<tool_call>{name}\n{pairs}</tool_call><|observation|>"


def kimi_call(name: str, arguments: dict[str, str], number: int) -> str:
    begin, end, call, values, call_end = KIMI_MARKS
    return f"I call it.{begin}{call}functions.{name}:{number}{values}{json.dumps(arguments)}{call_end}{end}<|im_end|>"


FINAL = "<|channel|>analysis<|message|>It is there.<|end|><|start|>assistant<|channel|>final<|message|>"
FORMATS = {
    "Qwen3-Coder": Format((), (), qwen_call, "All done.<|im_end|>"),
    "openai-gpt-oss-120b": Format(MARKS, ("<|call|>", "<|return|>"), harmony_call, f"{FINAL}All done.<|return|>", True),
    "GLM-4.6": Format(
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        ("<|user|>", "<|observation|>"), glm_call, "\n<think>It is there.</think>\nAll done.<|user|>", True,
    ),
    "Kimi-K2-Instruct": Format(
        (*KIMI_MARKS, "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"),
        (), kimi_call, "All done.<|im_end|>",
    ),
}  # fmt: skip
"""By the name of a published template."""
SERVERS = [(name, keep) for name, written in FORMATS.items() for keep in (False, True)[: 1 + written.thinks]]


class Served(NamedTuple):
    written: Format
    model: Model
    keep_thinking: bool


@pytest.fixture(scope="module", params=SERVERS, ids=lambda p: p[0] + "-keep_thinking" * p[1])
def served(request, shared_data: Path, tmp_path_factory) -> Iterator[Served]:
    name, keep = request.param
    template = shared_data / "chat_templates" / f"{name}.jinja"
    if not template.exists():
        pytest.skip(f"no {template}")
    written = FORMATS[name]
    folder = make_chat(tmp_path_factory.mktemp("model"), template.read_text(), written.specials)
    sizes = {"num_pages": 1 << 20, "context": 1 << 18}
    with scripted_chat(folder, written.ends, **sizes, model_aliases=("claude-*",), keep_thinking=keep) as model:
        yield Served(written, model, keep)


# ---------------------------------------------------------------- agents


class Agent:
    """An installed agent in a home and a folder of its own."""

    name = ""
    package = ""
    """Its name at npm; the Makefile has the version."""
    route = ""
    """By which it asks the model."""
    calls: list[tuple[str, dict[str, str]]] = []
    """Calls that do the task, with the agent's own tools; FILE is the file's path."""
    show: tuple[str, dict[str, str]]
    """A call that does what is asked in the second run."""

    def __init__(self, home: Path, url: str) -> None:
        self.home, self.url, self.folder = home, url, home / "work"
        self.file = self.folder / "hello.txt"
        self.folder.mkdir(parents=True)
        self.command = FOLDER / "node_modules" / ".bin" / self.name
        if not self.command.exists():
            pytest.skip(f"{self.name} is not installed in {FOLDER} (make test-agents)")

    def environment(self) -> dict[str, str]:
        nowhere = "http://127.0.0.1:9"
        return {
            "PATH": os.environ["PATH"], "HOME": str(self.home), "LANG": "C.UTF-8", "TERM": "dumb",
            "HTTP_PROXY": nowhere, "HTTPS_PROXY": nowhere, "NO_PROXY": "127.0.0.1",
        }  # fmt: skip

    def arguments(self, task: str, again: bool) -> list[str]:
        """Of the command; `again`: to go on with the conversation of the run before."""
        raise NotImplementedError

    def run(self, task: str, again: bool = False) -> list[dict[str, Any]]:
        """Run it to its end. Returns its events."""
        command = [str(self.command), *self.arguments(task, again)]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment(), stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        assert "All done." in done.stdout
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    def usage(self, events: list[dict[str, Any]]) -> tuple[int, int]:
        """Tokens of all prompts of a run, and the cached ones among them, as the agent was told."""
        raise NotImplementedError

    def filled(self, call: tuple[str, dict[str, str]]) -> tuple[str, dict[str, str]]:
        name, arguments = call
        return name, {key: value.replace("FILE", str(self.file)) for key, value in arguments.items()}


class ClaudeCode(Agent):
    name = "claude"
    package = "@anthropic-ai/claude-code"
    route = "/v1/messages"
    calls = [
        ("Write", {"file_path": "FILE", "content": "hello"}),
        ("Bash", {"command": "cat hello.txt", "description": "Shows it"}),
    ]
    show = ("Read", {"file_path": "FILE"})

    def environment(self) -> dict[str, str]:
        return super().environment() | {
            "ANTHROPIC_BASE_URL": self.url, "ANTHROPIC_AUTH_TOKEN": "any", "DISABLE_TELEMETRY": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "IS_SANDBOX": "1",
        }  # fmt: skip

    def arguments(self, task: str, again: bool) -> list[str]:
        on = ["--continue"] if again else []
        on += [
            "--model",
            "claude-sonnet-4-5",
        ]  # it tells the model's name in its instructions, and might change its mind
        return [*on, "--print", "--dangerously-skip-permissions", "--output-format", "json", task]

    def usage(self, events: list[dict[str, Any]]) -> tuple[int, int]:
        usage = events[-1]["usage"]
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + usage["cache_creation_input_tokens"] + cached, cached


class Codex(Agent):
    name = "codex"
    package = "@openai/codex"
    route = "/v1/responses"
    calls = [("exec_command", {"cmd": "echo hello > hello.txt"}), ("exec_command", {"cmd": "cat hello.txt"})]
    show = ("exec_command", {"cmd": "cat ./hello.txt"})

    def __init__(self, home: Path, url: str) -> None:
        super().__init__(home, url)
        (home / ".codex").mkdir()
        (home / ".codex" / "config.toml").write_text(
            'model = "m"\nmodel_provider = "here"\n[analytics]\nenabled = false\n'
            f'[model_providers.here]\nname = "here"\nbase_url = "{url}/v1"\n'
            'wire_api = "responses"\nenv_key = "ANY_KEY"\n'
        )

    def environment(self) -> dict[str, str]:
        return super().environment() | {"ANY_KEY": "any"}

    def arguments(self, task: str, again: bool) -> list[str]:
        on = ["resume", "--last"] if again else []
        return ["exec", *on, "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json", task]

    def usage(self, events: list[dict[str, Any]]) -> tuple[int, int]:
        usage = events[-1]["usage"]
        return usage["input_tokens"], usage["cached_input_tokens"]


class OpenCode(Agent):
    name = "opencode"
    package = "opencode-ai"
    route = "/v1/chat/completions"
    calls = [
        ("write", {"filePath": "FILE", "content": "hello"}),
        ("bash", {"command": "cat hello.txt", "description": "Shows it"}),
    ]
    show = ("read", {"filePath": "FILE"})

    def __init__(self, home: Path, url: str) -> None:
        super().__init__(home, url)
        here = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": f"{url}/v1", "apiKey": "any"}}
        config = {"model": "here/m", "provider": {"here": here | {"models": {"m": {}}}}}
        (self.folder / "opencode.json").write_text(json.dumps(config | {"autoupdate": False, "share": "disabled"}))

    def environment(self) -> dict[str, str]:
        return super().environment() | {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"}

    def arguments(self, task: str, again: bool) -> list[str]:
        on = ["--continue"] if again else ["--title", "hello"]  # without a title it asks the model for one
        return ["run", *on, "--format", "json", task]

    def usage(self, events: list[dict[str, Any]]) -> tuple[int, int]:
        tokens = [event["part"]["tokens"] for event in events if event["type"] == "step_finish"]
        cached = sum(t["cache"]["read"] for t in tokens)
        return sum(t["input"] for t in tokens) + cached, cached


AGENTS = (ClaudeCode, Codex, OpenCode)


@pytest.fixture(params=AGENTS, ids=lambda kind: kind.name)
def agent(request, served, tmp_path) -> Agent:
    return request.param(tmp_path, served.model.url)


# ---------------------------------------------------------------- tests


def prompts(model: Model) -> list[int]:
    return [len(request.prompt.ids) // 4 for request, *_ in model.answers]


def computed(model: Model) -> list[int]:
    """Tokens of each prompt and its answer, less the last one, which was not computed."""
    return [len(request.prompt.ids) // 4 + len(ids) - 1 for request, _, _, ids in model.answers]


def test_an_agent_does_its_task_and_each_turn_hits_all_but_its_new_tokens(served, agent):
    """Also that of a second run. Where the template drops thoughts at a new question, only if they are kept."""
    written, model, keep = served
    calls = [agent.filled(call) for call in agent.calls]
    model.says(*[written.call(*call, number) for number, call in enumerate(calls)], written.done)
    events = agent.run(TASK)
    assert agent.file.read_text().strip() == "hello"
    assert len(model.answers) == 3 and model.script.cached[1:] == computed(model)[:2]
    assert model.routes == {agent.route}
    assert agent.usage(events) == (sum(prompts(model)), sum(model.script.cached)), "the agent is told the same"

    question, whole = prompts(model)[0], computed(model)[-1]
    model.says(written.call(*agent.filled(agent.show), len(calls)), written.done)
    agent.run(MORE, again=True)
    assert len(model.answers) == 2 and model.script.cached[1] == computed(model)[0]
    if keep or not written.thinks:
        assert model.script.cached[0] == whole
    else:
        assert question <= model.script.cached[0] < whole


@pytest.mark.parametrize("agent", [ClaudeCode], indirect=True, ids=["claude"])
def test_what_claude_code_changes_in_its_own_call_is_lost_and_nothing_before_it(served, agent):
    """It leaves out `cd FOLDER &&` in the history."""
    written, model, _ = served
    command = {"command": f"cd {agent.folder} && echo hello > hello.txt", "description": "Writes it"}
    model.says(written.call("Bash", command, 0), written.done)
    agent.run(TASK)
    assert agent.file.read_text() == "hello\n"
    (first, _), (_, second) = prompts(model), model.script.cached
    assert first <= second <= computed(model)[0]
