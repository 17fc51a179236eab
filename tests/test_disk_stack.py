"""The whole stack with a model: a worker that is killed goes on where it was, from disk."""

from __future__ import annotations

import time

import pytest

from radixrt.client import Client
from radixrt.messages import Sampling
from tests.test_stack import folder, stack  # noqa: F401
from tests.worker.engine import prompts

FEW = Sampling(max_tokens=16, temperature=0.0, ignore_eos=True)


@pytest.mark.slow
def test_a_conversation_hits_to_its_last_token_after_kill_9(folder, tmp_path):  # noqa: F811
    prompt = prompts(1, 1500, 1500)[0]
    settings = {"kv_disk_path": str(tmp_path), "kv_disk_size": 0.5}
    with stack(folder, 1, **settings) as running, Client(running._client_address) as client:
        answer = client.generate(prompt, FEW)
        assert answer.usage.cached_tokens == 0
        time.sleep(1.0)  # the last unwritten moments may be lost
        worker = next(child for child in running._subprocesses if child.role == "worker")
        worker.process.kill()
        worker.process.wait()
    with stack(folder, 1, **settings) as running, Client(running._client_address) as client:
        history = [*prompt, *answer.token_ids, 7, 8]
        again = client.generate(history, FEW)
        assert again.usage.cached_tokens >= len(history) - 3, "all but the last token, which was not computed"
