"""What FakeRunner will say, known beforehand: expected answers, drafts of them, and random loads that are checked by
them."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from radixrt.messages import Sampling
from radixrt.worker.execution.fake_runner import fake_token
from radixrt.worker.request import Request
from radixrt.worker.speculative.ngram import Drafter
from tests.worker.engine import Engine, prompts

VOCAB = 512


def said(prompt: list[int], count: int, vocab_size: int = VOCAB) -> list[int]:
    """The `count` tokens that FakeRunner says after `prompt`."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(fake_token(tokens[-1], len(tokens) - 1, vocab_size))
    return tokens[len(prompt) :]


class Prophet(Drafter):
    """Drafts what FakeRunner will say, and lies in one of `truth` tokens; always if that is 1. One of ten drafts is
    empty."""

    def __init__(self, most: int, rests: bool, truth: int, seed: int = 0, vocab_size: int = VOCAB) -> None:
        super().__init__(most, rests)
        self._random = random.Random(seed)
        self._truth = truth
        self._vocab_size = vocab_size
        self.sizes: list[int] = []

    def begins(self, request: Request, requests: int) -> bool:
        return request.score_from is None and request.total + 2 <= request.limit and self._random.random() < 0.7

    def draft(self, request: Request, most: int, requests: int) -> list[int]:
        count = min(most, self.most, request.limit - len(request.tokens) - 1)
        ids = [i if self._random.randrange(self._truth) else 3 for i in said(request.tokens, count, self._vocab_size)]
        if self._random.random() < 0.1:
            return []
        self.sizes.append(len(ids))
        return ids


def random_load(data: st.DataObject, engine: Engine) -> dict[int, list[int]]:
    """Runs requests that come, some of which go, while steps are run, until none is left. Returns what each that was
    not aborted has to have said."""
    wanted = {}
    for seed in range(data.draw(st.integers(1, 8))):
        prompt = prompts(1, 1, 20, vocab_size=VOCAB, seed=data.draw(st.integers(0, 2)) + seed % 2)[0]
        count = data.draw(st.integers(1, 30))
        id = engine.add(prompt, Sampling(max_tokens=count, temperature=0.0, ignore_eos=True))
        wanted[id] = said(prompt, count)
        for _ in range(data.draw(st.integers(0, 4))):
            engine.step()
        if data.draw(st.integers(0, 9)) == 0:
            gone = data.draw(st.sampled_from(sorted(wanted)))
            engine.scheduler.abort(gone)
            del wanted[gone]
    engine.finish()
    return wanted
