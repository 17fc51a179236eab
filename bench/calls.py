"""Tokens computed in an agent's session whose client rewrites its calls before it sends them back, as Claude Code does.

    python -m bench.calls [--data FOLDER]

A session of TURNS calls, after a question: the agent reads a file, edits it, and runs a test, again and again. The
client adds `"replace_all": false` to each Edit, and strips `cd DIR && ` from each Bash command. Answers are generated
in the published template's format, as phi-2's tokenizer encodes it. The cache forgets nothing: what of a prompt is
computed is what does not begin an earlier prompt with its answer, less that answer's last token. No model runs.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import tempfile
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import save, table
from radixrt.messages import ChatPrompt, Namespace
from radixrt.tokens import Sessions, Tokenizer, load_tokenizer

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
TURNS = 15
RESULT_WORDS = {"Read": 600, "Edit": 20, "Bash": 80}
WORDS = "def the value of a test is not None and then it returns self with all items in order for each case".split()
HERE = Namespace("bench")
Given = dict[str, Any]


def words(count: int, seed: int) -> str:
    return " ".join(WORDS[(i * (seed % 7 + 2) + seed) % len(WORDS)] for i in range(count))


def called(turn: int) -> tuple[str, Given, Given]:
    """(tool, arguments as generated, arguments as the client sends them back) of a turn."""
    match turn % 3:
        case 0:
            given: Given = {"file_path": f"/home/user/project/part_{turn}.py"}
            return "Read", given, given
        case 1:
            given = {"file_path": f"/home/user/project/part_{turn - 1}.py", "old_string": words(60, turn)}
            given["new_string"] = words(80, turn + 1)
            return "Edit", given, given | {"replace_all": False}
    command = f"python -m pytest tests/test_part_{turn - 2}.py -x -q 2>&1 | tail -20"
    given = {"command": f"cd /home/user/project && {command}", "description": "Run the tests of the part"}
    return "Bash", given, given | {"command": command}


def as_xml(name: str, given: Given) -> str:
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given.items())
    return f"I go on with it.\n\n<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def as_pairs(name: str, given: Given) -> str:
    pairs = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in given.items())
    return f"\n<think></think>\nI go on with it.\n<tool_call>{name}\n{pairs}</tool_call>"


def as_json(name: str, given: Given) -> str:
    written = json.dumps({"name": name, "arguments": given})
    return f"I go on with it.\n<tool_call>\n{written}\n</tool_call>"


FORMATS: dict[str, tuple[Callable[[str, Given], str], str, tuple[str, ...]]] = {
    "Qwen3-Coder": (as_xml, "<|im_end|>", ("<|im_start|>",)),
    "GLM-4.6": (as_pairs, "<|observation|>", ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>")),
    "Qwen-Qwen2.5-7B-Instruct": (as_json, "<|im_end|>", ("<|im_start|>",)),
}
"""By published template: (how a call is written, the token that ends an answer, other special tokens)."""


def tokenizer_of(data: Path, name: str, folder: Path) -> Tokenizer:
    """phi-2's, with the template's special tokens."""
    folder.mkdir()
    source = data / "tokenizers" / "phi-2"
    (folder / "tokenizer.json").write_bytes(gzip.decompress((source / "tokenizer.json.gz").read_bytes()))
    config = json.loads((source / "tokenizer_config.json").read_text())
    _, end, more = FORMATS[name]
    config["added_tokens_decoder"] |= {
        str(50_295 + i): {"content": special, "special": True} for i, special in enumerate((end, *more))
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    shutil.copyfile(data / "chat_templates" / f"{name}.jinja", folder / "chat_template.jinja")
    return load_tokenizer(folder)


def session(tokenizer: Tokenizer, name: str, keep_calls: bool) -> list[tuple[str, int, int]]:
    """(call before it, tokens of the prompt, those of them that are computed) for each turn after the first."""
    write, end, _ = FORMATS[name]
    tools = [
        {"type": "function", "function": {"name": tool, "parameters": {"type": "object"}}} for tool in RESULT_WORDS
    ]
    system = {"role": "system", "content": words(4000, 1)}
    messages: list[Given] = [system, {"role": "user", "content": "Repair all parts of the project."}]
    sessions, before = Sessions(tokenizer, keep_calls=keep_calls), ""
    seen: list[np.ndarray] = []
    found: list[tuple[str, int, int]] = []
    end_id = tokenizer.token_id(end)
    assert end_id is not None
    for turn in range(TURNS + 1):
        encoded = sessions.encode_chat(HERE, ChatPrompt(messages, tools))
        ids = np.frombuffer(encoded.ids, "<i4")
        if seen:
            found.append((before, len(ids), len(ids) - max(common(ids, other) for other in seen)))
        before, generated, client = called(turn)
        answer = array("i", [*tokenizer.encode(write(before, generated), False), end_id])
        seen.append(np.concatenate([ids, np.array(answer[:-1], "<i4")]))
        call = {"id": f"call_{turn:024x}", "type": "function"}
        message = {"role": "assistant", "content": "I go on with it."}

        def with_call(given: Given, tool: str = before, call: Given = call, message: Given = message) -> Given:
            return message | {"tool_calls": [call | {"function": {"name": tool, "arguments": json.dumps(given)}}]}

        sessions.remember(encoded, with_call(generated), answer.tobytes())
        result = {
            "role": "tool",
            "tool_call_id": call["id"],
            "name": before,
            "content": words(RESULT_WORDS[before], turn),
        }
        messages += [with_call(client), result]
    return found


def common(one: np.ndarray, other: np.ndarray) -> int:
    """The length of the common beginning of two sequences."""
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0]) if differ.size else size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder with chat_templates and tokenizers")
    data = parser.parse_args().data
    rows = []
    with tempfile.TemporaryDirectory() as root:
        for name in FORMATS:
            tokenizer = tokenizer_of(data, name, Path(root) / name)
            for keep in (False, True):
                found = session(tokenizer, name, keep)
                row: dict[str, Any] = {"template": name, "--keep-generated-calls": "yes" if keep else "no"}
                for tool in RESULT_WORDS:
                    computed = [tokens for before, _, tokens in found if before == tool]
                    row[f"after {tool}"] = round(sum(computed) / len(computed))
                rows.append(
                    row | {"a turn": round(sum(turn[2] for turn in found) / len(found)), "prompt": found[-1][1]}
                )
    print("tokens computed a turn, mean; of the last prompt's\n", table(rows), sep="\n")
    save("calls", rows, turns=TURNS)


if __name__ == "__main__":
    main()
