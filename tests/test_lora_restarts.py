"""LoRA adapters that were loaded while it served, after processes of the stack were killed."""

from __future__ import annotations

import dataclasses

from radixrt.client import Client
from radixrt.launch.launcher import Stack, start_subprocess
from radixrt.messages import Sampling
from tests.adapters import make_adapter, merged
from tests.checkpoints import make_model, make_tokenizer
from tests.test_stack import config, watched
from tests.waiting import eventually
from tests.worker.engine import prompts
from tests.worker.test_models import greedy

TWELVE = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)


def test_a_killed_worker_and_a_killed_router_find_them_again(tmp_path):
    """The worker, which began with another version, gets it from the router; a new router learns it from workers."""
    folder = make_tokenizer(tmp_path / "m")
    model = make_model(folder, "llama", num_hidden_layers=2)
    paths = [make_adapter(tmp_path / str(seed), model, seed=seed) for seed in range(3)]
    prompt = prompts(1, 60, 60)[0]
    expected = [greedy(merged(model, path), prompt, 12) for path in paths]
    settings = config(
        folder, 2, enable_lora=True, allow_runtime_lora_updating=True, max_loras=2, lora_modules=(f"sql={paths[0]}",)
    )
    router = dataclasses.replace(settings.router, allow_runtime_lora_updating=True)
    with watched(Stack(dataclasses.replace(settings, router=router))) as running:
        address = running._client_address
        with Client(address) as client:
            assert list(client.generate(prompt, TWELVE, model="sql").token_ids) == expected[0]
            client.load_adapter("sql", str(paths[1]), in_place=True)
            client.load_adapter("bot", str(paths[2]))
            kill(running, "worker-0")
            eventually(lambda: [w["name"] for w in client.health()["workers"]] == ["worker-1"])
            assert list(client.generate(prompt, TWELVE, model="sql").token_ids) == expected[1]
            eventually(lambda: len(client.health()["workers"]) == 2)
            kill(running, "worker-1")
            eventually(lambda: "worker-1" not in [w["name"] for w in client.health()["workers"]])
            for name, number in (("sql", 1), ("bot", 2)):
                answer = client.generate(prompt, TWELVE, model=name)
                assert list(answer.token_ids) == expected[number] and answer.usage.worker == "worker-0"
            eventually(lambda: len(client.health()["workers"]) == 2)
        running.request_stop()  # of the watch, which would end the stack with its router
        router_child = running._subprocesses[0]
        router_child.process.kill()
        router_child.process.communicate()
        running._subprocesses[0] = start_subprocess("router", "router", running._config.router)
        with Client(address) as client:
            eventually(lambda: len(client.health()["workers"]) == 2)
            for name, number in (("sql", 1), ("bot", 2)):
                assert list(client.generate(prompt, TWELVE, model=name).token_ids) == expected[number]
            client.load_adapter("sql", str(paths[0]), in_place=True)
            assert list(client.generate(prompt, TWELVE, model="sql").token_ids) == expected[0]


def kill(running: Stack, name: str) -> None:
    next(child for child in running._subprocesses if child.name == name).process.kill()
