"""Time to encode a long history with one new message, if only that message has not been encoded before.

    python -m bench.tokens [--quick] [--data FOLDER]

For each tokenizer, a history of 40,000 tokens (transcripts of software agents) followed by a new message is encoded by
the tokenizer library, as a whole, and by radixrt; ids are compared before anything is timed. `chat` rows are the 30th
turn of a session of 40,000 tokens by `Sessions.encode_chat`, with the template, and with answers that keep their
generated ids; the reference renders the template and encodes its text as a whole. Without FOLDER (with the tokenizers
and transcripts that tests also use), a small tokenizer and made-up text are used.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.common import save, table
from radixrt.messages import NO_TENANT, ChatPrompt
from radixrt.tokens import Sessions, Tokenizer, load_tokenizer
from tests.checkpoints import TRAINING_TEXT, make_tokenizer

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
REAL = {
    "mistral": "mistral/tokenizer.model.v1",
    "phi-3-mini": "phi-3-mini",
    "falcon": "falcon-tokenizer",
    "t5-small": "t5-small",
    "gpt2": "gpt2",
}
TURNS = 30
MESSAGE = "\nOBSERVATION: {} tests passed, {} failed. Keep going, and say what you would try next; then run it.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small case, to see that it runs")
    parser.add_argument("--data", type=Path, default=DATA, help="folder with tokenizers and transcripts")
    args = parser.parse_args()
    tokens, repeats = (2_000, 3) if args.quick else (40_000, 15)
    has_data = args.data.is_dir() and not args.quick
    rows = []
    with tempfile.TemporaryDirectory() as root:
        names = {"made": "", **(REAL if has_data else {})}
        text = transcript(args.data) if has_data else made_up()
        for name, source in names.items():
            tokenizer = load(Path(root) / name, args.data / "tokenizers" / source if source else None)
            rows.append({"case": name} | text_row(tokenizer, text, tokens, repeats))
            if tokenizer.token_id("<|im_end|>") is not None:
                rows.append({"case": f"chat, {name}"} | chat_row(tokenizer, text, tokens, repeats))
    print(table(rows))
    if not args.quick:
        save("tokens", rows, history_tokens=tokens, repeats=repeats, real=has_data)


def load(folder: Path, source: Path | None) -> Tokenizer:
    """Load the tokenizer at `source`, which is unpacked into `folder`; without `source`, a small one."""
    if source is None:
        return load_tokenizer(make_tokenizer(folder))
    folder.mkdir()
    if source.is_file():
        (folder / "tokenizer.model").write_bytes(source.read_bytes())
    for path in source.iterdir() if source.is_dir() else ():
        raw = path.read_bytes()
        (folder / path.name.removesuffix(".gz")).write_bytes(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    if source.name == "gpt2":
        (folder / "config.json").write_text('{"model_type": "gpt2"}')
    return load_tokenizer(folder)


def transcript(data: Path) -> str:
    """Concatenated messages of software agents."""
    return "".join(_messages(data / "swe_agent" / "trajectories.jsonl.gz")) + made_up()


def _messages(path: Path) -> Iterator[str]:
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as lines:
        for line in lines:
            yield from (f"{message['role']}: {message['content']}\n" for message in json.loads(line)["messages"])


def made_up() -> str:
    rng = random.Random(0)
    words = [word for text in TRAINING_TEXT for word in text.split()] + ["zero", "quite", "key"]
    return " ".join(rng.choice(words) for _ in range(60_000))


def text_row(tokenizer: Tokenizer, text: str, tokens: int, repeats: int) -> dict[str, Any]:
    """Medians in ms: history and new message encoded by the library as a whole, by radixrt, and by radixrt again
    (`seen_before_ms`)."""
    text = cut(tokenizer, text, tokens)
    whole = tokenizer._backend.encode
    news = [text + MESSAGE.format(n, n + 1) for n in range(repeats)]
    tokenizer.encode(text)
    assert [tokenizer.encode(new) for new in news] == [whole(new, True) for new in news], "ids differ"
    fresh = [text + MESSAGE.format(n, n + 1) for n in range(100, 100 + repeats)]
    full_ms = median_ms(lambda new: whole(new, True), fresh)
    ours_ms = median_ms(tokenizer.encode_bytes, fresh)
    return {
        "tokens": len(whole(text, True)),
        "chars": len(text),
        "whole_ms": full_ms,
        "one_more_ms": ours_ms,
        "times_faster": full_ms / ours_ms,
        "seen_before_ms": median_ms(tokenizer.encode_bytes, fresh),
    }


def chat_row(tokenizer: Tokenizer, text: str, tokens: int, repeats: int) -> dict[str, Any]:
    """Medians in ms of the last turn of a session, by the library as a whole and by radixrt."""
    text = cut(tokenizer, text, tokens)
    sessions, messages = Sessions(tokenizer), []
    size = len(text) // (2 * TURNS)
    pieces = [text[at : at + size] for at in range(0, len(text), size)][: 2 * TURNS]
    before = b""
    for asked, answered in zip(pieces[::2], pieces[1::2], strict=True):
        messages.append({"role": "user", "content": asked})
        encoded = sessions.encode_chat(NO_TENANT, ChatPrompt(messages))
        assert encoded.ids.startswith(before), "a prompt does not begin with the one before it and its answer"
        ids = tokenizer.encode_continuation(answered[: size // 2]) + tokenizer.encode_continuation(
            answered[size // 2 :]
        )
        generated = b"".join(i.to_bytes(4, "little") for i in [*ids, tokenizer.token_id("<|im_end|>")])
        message = {"role": "assistant", "content": answered}
        sessions.remember(encoded, message, generated)
        messages.append(message)
        before = encoded.ids + generated
    chats = [
        ChatPrompt([*messages, {"role": "user", "content": MESSAGE.format(n, n)}]) for n in range(100, 100 + repeats)
    ]
    whole_ms = median_ms(lambda chat: tokenizer._backend.encode(tokenizer.apply_chat(chat), False), chats)
    ours_ms = median_ms(lambda chat: sessions.encode_chat(NO_TENANT, chat), chats)
    encoded = sessions.encode_chat(NO_TENANT, chats[0])
    assert encoded.ids.startswith(before) and encoded.kept_turns == TURNS
    return {
        "tokens": len(encoded.ids) // 4,
        "chars": len(encoded.text),
        "whole_ms": whole_ms,
        "one_more_ms": ours_ms,
        "times_faster": whole_ms / ours_ms,
        "seen_before_ms": median_ms(lambda chat: sessions.encode_chat(NO_TENANT, chat), chats),
    }


def cut(tokenizer: Tokenizer, text: str, tokens: int) -> str:
    """About the first `tokens` tokens of a text."""
    ids = tokenizer._backend.encode(text, False)
    assert len(ids) >= tokens
    return text[: len(text) * tokens // len(ids)]


def median_ms(work: Callable[[Any], Any], items: list[Any]) -> float:
    times = []
    for item in items:
        began = time.perf_counter()
        work(item)
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


if __name__ == "__main__":
    main()
