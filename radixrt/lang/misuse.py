"""What programs that were written for other engines call the fields of a gen, and what they are called here."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

WORDS: dict[str, str] = {
    **dict.fromkeys(
        ("max_new_tokens", "max_completion_tokens", "max_output_tokens", "max_length", "num_predict"), "max_tokens"
    ),
    "min_new_tokens": "min_tokens",
    **dict.fromkeys(("stop_sequences", "stop_strings"), "stop"),
    **dict.fromkeys(("top_logprobs", "top_logprobs_num", "return_logprob"), "logprobs"),
    **dict.fromkeys(("random_seed", "sampling_seed"), "seed"),
    **dict.fromkeys(("json_schema", "guided_json", "response_format", "response_model"), "schema"),
    **dict.fromkeys(("guided_regex", "pattern"), "regex"),
    **dict.fromkeys(("include_stop_str_in_output", "no_stop_trim"), "include_stop"),
    "functions": "tools",
    "temp": "temperature",
}
"""By the words of SGLang, vLLM, OpenAI, Anthropic, transformers and Ollama."""
ELSEWHERE: dict[str, str] = {
    **dict.fromkeys(("choices", "guided_choice"), "write select({name!r}, [...]), which chooses among texts"),
    **dict.fromkeys(("ebnf", "guided_grammar"), 'write grammar=Grammar("ebnf", ...)'),
    "dtype": "write regex= or schema=, for example schema=int",
    "do_sample": "write temperature=0 for the most likely tokens",
    **dict.fromkeys(("n", "best_of"), "write s.fork(n), and a gen in each branch"),
    "tool_choice": "with tools= the model chooses; a schema= makes it write one call",
    "model": "the client has it: Client(url, model=...)",
}


def unknown_fields(name: str, fields: Mapping[str, Any], known: Iterable[str]) -> TypeError | None:
    """The error for the first of the gen's `fields` that is not `known`, which says what to write instead."""
    names = [*known]
    for field in fields:
        if field not in names:
            return TypeError(f"gen {name!r}: there is no field {field}: {_instead(name, field, fields[field], names)}")
    return None


def _instead(name: str, field: str, value: Any, known: list[str]) -> str:
    if field in ELSEWHERE:
        return ELSEWHERE[field].format(name=name)
    word = WORDS.get(field) or next(iter(difflib.get_close_matches(field, known, 1)), None)
    if word is None:
        return f"it has {', '.join(known)}"
    plain = isinstance(value, int | float | str) and not isinstance(value, bool)
    return f"write {word}={value!r}" if plain else f"write {word}="
