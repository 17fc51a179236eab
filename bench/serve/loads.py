"""The loads, as shapes: which segments of token ids a prompt joins, and whose end starts it. Pure.

    plain     256 requests at once, 1,024 in, 256 out, nothing shared
    trunk16k  a trunk of 16,384 tokens (1 out), then 256 at once: trunk + 128 own in, 256 out
    trunk4k   a trunk of 4,096 tokens (1 out), then 128 at once: trunk + 256 own in, 256 out
    sessions  64 agents at once on 3 system prompts of 6,000 tokens; 8 turns each: a turn appends 300 to 900 tokens,
              generates 96 and appends 96 more ids in place of the answer; the next turn follows at once
    tot       8 roots under one prompt of 2,048 tokens, fan-out 4, depth 3: a node appends 200 tokens to its parent's,
              generates 64, then its 4 children start together
    hit       16,384 cached tokens + 128 new, 1 out, one at a time, 20 times
    cold      16,384 new tokens, 1 out, one at a time, 8 times

Asked for by name, for a cache of 320,000 tokens, which holds a half of what they have, or a third:

    pressed   160 agents at once on 3 system prompts of 3,000 tokens, with 1,000 to 3,000 of their own; 5 turns each, as
              those of sessions, but 150 to 500 tokens and 64
    tools     the same, whose tools take 2 seconds between two turns
    long      48 agents with 15,000 to 20,000 tokens of their own
    mixed     100 agents like those of pressed, of ten turns, beside 12 who ask ten times, one after the other, about
              1,000 to 6,000 tokens that nobody else has
    tenants   as pressed, but the agents are of five tenants, 32 of each, who share nothing
    uneven    the same of four tenants, of 120, 30, 9 and 1 agents

A tenant's name is its key, and radixrt knows tenants by their keys: `-- --api-key a:tenant-0 --api-key b:tenant-1`.

What follows an answer does not contain it: the same tokens are sent to every server, whatever it generates.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

LOWEST_ID, END_OF_IDS = 1_000, 120_000
"""Ids are drawn from here to before there: clear of special tokens at both ends."""
SYSTEM_PROMPTS, TURNS = 3, 8
FAN_OUT, LEVELS = 4, 4
Size = Callable[[int], int]
"""What is left of a count of requests or tokens under the scale of a run."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: its prompt is the segments `parts`, joined. It starts `pause` seconds after the end of the ask
    `after`; None: at once. Those of a `tenant` have an API key of their own."""

    parts: tuple[int, ...]
    max_tokens: int
    after: int | None = None
    pause: float = 0.0
    tenant: str = ""


@dataclass(slots=True)
class Load:
    """Requests over `segments`, whose lengths are in tokens. `prepare` runs before the clock, one after another."""

    name: str
    segments: list[int] = field(default_factory=list)
    asks: list[Ask] = field(default_factory=list)
    prepare: list[Ask] = field(default_factory=list)

    def segment(self, tokens: int) -> int:
        """A new segment of ids that nobody else has."""
        self.segments.append(tokens)
        return len(self.segments) - 1

    def ask(
        self, parts: tuple[int, ...], max_tokens: int, after: int | None = None, pause: float = 0.0, tenant: str = ""
    ) -> int:
        self.asks.append(Ask(parts, max_tokens, after, pause, tenant))
        return len(self.asks) - 1

    def prompt_tokens(self, ask: Ask) -> int:
        return sum(self.segments[part] for part in ask.parts)

    def new_prefixes(self) -> set[tuple[int, ...]]:
        """The nodes of the tree of all prompts that are not there before the clock: each must be computed once."""
        return prefixes(self.asks) - prefixes(self.prepare)

    def shareable(self) -> float:
        """The share of prompt tokens that a cache which forgets nothing, and waits for what is under way, reuses."""
        new = sum(self.segments[path[-1]] for path in self.new_prefixes())
        return 1.0 - new / sum(self.prompt_tokens(ask) for ask in self.asks)


def prefixes(asks: Iterable[Ask]) -> set[tuple[int, ...]]:
    """Every prompt cut after every segment: the nodes of their tree. A node's last part is the segment it adds."""
    return {ask.parts[:end] for ask in asks for end in range(1, len(ask.parts) + 1)}


def segment_ids(load: str, segment: int, tokens: int, *, seed: int, repetition: int, vocab_size: int) -> np.ndarray:
    """The ids of a segment: the same for the same arguments, others for any other load, repetition or seed."""
    low, end = min(LOWEST_ID, vocab_size // 2), min(END_OF_IDS, vocab_size)
    key = [seed, repetition, zlib.crc32(load.encode()), segment]
    return np.random.default_rng(key).integers(low, end, tokens, dtype=np.int32)


# ---------------------------------------------------------------- the seven


def plain(load: Load, size: Size) -> None:
    for _ in range(size(256)):
        load.ask((load.segment(size(1024)),), size(256))


def trunk16k(load: Load, size: Size) -> None:
    under_trunk(load, size, trunk=16_384, requests=256, own=128)


def trunk4k(load: Load, size: Size) -> None:
    under_trunk(load, size, trunk=4_096, requests=128, own=256)


def under_trunk(load: Load, size: Size, trunk: int, requests: int, own: int) -> None:
    shared = load.segment(size(trunk))
    first = load.ask((shared,), 1)
    for _ in range(size(requests)):
        load.ask((shared, load.segment(size(own))), size(256), after=first)


def sessions(load: Load, size: Size) -> None:
    # Lengths are the same in every run, so that runs differ in ids and not in work.
    draw = np.random.default_rng(0)
    systems = [load.segment(size(6_000)) for _ in range(SYSTEM_PROMPTS)]
    for agent in range(size(64)):
        history, before = (systems[agent % SYSTEM_PROMPTS],), None
        for _ in range(TURNS):
            history = (*history, load.segment(size(int(draw.integers(300, 901)))))
            before = load.ask(history, size(96), after=before)
            history = (*history, load.segment(size(96)))


def tot(load: Load, size: Size) -> None:
    shared = load.segment(size(2_048))
    starts: list[tuple[tuple[int, ...], int | None]] = [((shared,), None)] * size(8)
    for _ in range(LEVELS):
        nodes = []
        for parent, after in starts:
            path = (*parent, load.segment(size(200)))
            nodes.append((path, load.ask(path, size(64), after=after)))
        starts = [node for node in nodes for _ in range(FAN_OUT)]


def hit(load: Load, size: Size) -> None:
    cached = load.segment(size(16_384))
    load.prepare.append(Ask((cached,), 1))
    one_at_a_time(load, [(cached, load.segment(size(128))) for _ in range(size(20))])


def cold(load: Load, size: Size) -> None:
    one_at_a_time(load, [(load.segment(size(16_384)),) for _ in range(size(8))])


def one_at_a_time(load: Load, prompts: list[tuple[int, ...]]) -> None:
    before = None
    for parts in prompts:
        before = load.ask(parts, 1, after=before)


# ---------------------------------------------------------------- asked for by name


def pressed(load: Load, size: Size) -> None:
    agents_with_much(load, size, agents=160, own=(1_000, 3_000))


def tools(load: Load, size: Size) -> None:
    agents_with_much(load, size, agents=160, own=(1_000, 3_000), pause=2.0)


def long(load: Load, size: Size) -> None:
    agents_with_much(load, size, agents=48, own=(15_000, 20_000))


def mixed(load: Load, size: Size) -> None:
    agents_with_much(load, size, agents=100, own=(1_000, 3_000), turns=10)
    draw = np.random.default_rng(2)
    for _ in range(size(12)):
        before = None
        for _ in range(10):
            before = load.ask((load.segment(size(int(draw.integers(1_000, 6_000)))),), size(64), after=before)


def tenants(load: Load, size: Size) -> None:
    agents_of_tenants(load, size, [32] * 5)


def uneven(load: Load, size: Size) -> None:
    agents_of_tenants(load, size, [120, 30, 9, 1])


def agents_of_tenants(load: Load, size: Size, agents: list[int]) -> None:
    for number, of_tenant in enumerate(agents):
        agents_with_much(load, size, agents=of_tenant, own=(1_000, 3_000), tenant=f"tenant-{number}")


def agents_with_much(
    load: Load, size: Size, agents: int, own: tuple[int, int], turns: int = 5, pause: float = 0.0, tenant: str = ""
) -> None:
    draw = np.random.default_rng(1)
    systems = [load.segment(size(3_000)) for _ in range(SYSTEM_PROMPTS)]
    for agent in range(size(agents)):
        history = (systems[agent % SYSTEM_PROMPTS], load.segment(size(int(draw.integers(*own)))))
        before = None
        for _ in range(turns):
            history = (*history, load.segment(size(int(draw.integers(150, 500)))))
            waits = 0.0 if before is None else pause
            before = load.ask(history, size(64), after=before, pause=waits, tenant=tenant)
            history = (*history, load.segment(size(64)))


# ---------------------------------------------------------------- what comes before them


def warm_up(load: Load, size: Size) -> None:
    """What the seven do, in short: a long prompt, a full batch, half of it under that prompt, few tokens each."""
    trunk = load.segment(size(16_384))
    first = load.ask((trunk,), 1)
    for number in range(size(256)):
        own = load.segment(size(1_024))
        load.ask((trunk, own) if number % 2 else (own,), size(32), after=first)


def twice(load: Load, size: Size) -> None:
    """The same short prompt twice, at its full length under any scale: caches with large pages must hit, too."""
    prompt = (load.segment(128),)
    load.ask(prompt, 32, after=load.ask(prompt, 32))


MEASURED = {make.__name__: make for make in (plain, trunk16k, trunk4k, sessions, tot, hit, cold)}
ASKED_FOR = {make.__name__: make for make in (pressed, tools, long, mixed, tenants, uneven)}
OTHERS = {"warm-up": warm_up, "twice": twice}


def make_load(name: str, scale: float = 1.0) -> Load:
    """The load `name`; requests, and tokens in and out, by `scale` of what they are, but 2 at least where not 1."""

    def size(number: int) -> int:
        return number if number == 1 else max(2, round(number * scale))

    load = Load(name)
    (MEASURED | ASKED_FOR | OTHERS)[name](load, size)
    return load
