"""The GPU's runners of two ranks, in Triton's interpreter: together they generate what one alone does."""

from __future__ import annotations

import queue
import random
import threading

import msgspec
import numpy as np
import pytest
import torch

from radixrt.config import WorkerConfig, resolve
from radixrt.messages import Sampling
from radixrt.messages.ranks import Bind, RunStep
from radixrt.worker.cuda import ops
from radixrt.worker.cuda.attention.variants import Shape
from radixrt.worker.cuda.runner import CudaRunner
from radixrt.worker.load import options
from radixrt.worker.load import runner as loading
from radixrt.worker.load.pools import make_states
from radixrt.worker.model.parallel.sharding import Shard
from radixrt.worker.parallel import tensor_parallel
from radixrt.worker.parallel.tensor_parallel import Leader, PlanDecoder
from tests.checkpoints import make_model
from tests.worker import test_drafting as drafting
from tests.worker.cuda.ragged import PlainFlashInfer
from tests.worker.cuda.test_runner import INDEXED, SIZES
from tests.worker.engine import GREEDY, Engine, prompts
from tests.worker.families import GRANITE_HYBRID, GRANITE_MOE, NEMOTRON

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
WAIT = 60


class Meeting:
    """Where `size` ranks meet; one of them runs at a time."""

    def __init__(self, size: int) -> None:
        self.turn = threading.Lock()
        self.barrier = threading.Barrier(size)
        self.table: list = [None] * size

    def all(self, rank: int, what: tuple, mine: torch.Tensor) -> list[torch.Tensor]:
        self.table[rank] = what, mine
        self.turn.release()
        try:
            self.barrier.wait(WAIT)
            found = list(self.table)
            self.barrier.wait(WAIT)
        finally:
            self.turn.acquire()
        assert len({kind for kind, _ in found}) == 1, f"ranks meet for different things: {[k for k, _ in found]}"
        return [x for _, x in found]


class BatonGroup:
    """A group whose ranks run in turn: each goes on where it meets the others."""

    def __init__(self, shard: Shard, meeting: Meeting) -> None:
        self.shard, self._meeting = shard, meeting
        self.kinds: list[str] = []

    def _all(self, name: str, x: torch.Tensor) -> list[torch.Tensor]:
        self.kinds.append(name)
        return self._meeting.all(self.shard.rank, (name, tuple(x.shape)), x.clone())

    def buffer(self, turn, residual):
        self._turn = turn
        return torch.full_like(residual, torch.nan)

    def add(self, turn, part, residual, norm, ops):
        residual += sum(self._all(f"add {turn}", part))
        return norm(residual, ops)

    def gather(self, x):
        return torch.cat(self._all("gather", x), 1)

    def broadcast(self, x):
        x.copy_(self._all("broadcast", x)[0])


def make(folder, group):
    config = resolve(WorkerConfig(model=str(folder), device="cpu", max_total_tokens=1200, max_mamba_cache_size=24))
    loaded = options.look_up(config, group.shard if group else Shard())
    model = loading.load_model(config, loaded, False, ops=ops, group=group)
    pool = loading.make_pool(loaded, 1201, 1)
    spec = loaded.spec
    shape = Shape.of(spec, 1)
    return CudaRunner(
        model, pool, 1, rows=8, eos_ids=loaded.eos_ids, num_sms=4, group=group, states=make_states(config, loaded),
        flashinfer=None if spec.latent or spec.layers else PlainFlashInfer(shape, torch.float32, 300),
    )  # fmt: skip


class Told:
    """The way to the follower."""

    def __init__(self) -> None:
        self.messages: queue.Queue[bytes | None] = queue.Queue()
        self.paths: list[int] = []

    def send(self, message) -> None:
        if isinstance(message, RunStep):
            self.paths.append(len(message.paths or ()))
        self.messages.put(tensor_parallel._encode(message))


def follower(runner, told, meeting, problems) -> None:
    plans, before = PlanDecoder(), None
    try:
        while (payload := told.messages.get(timeout=WAIT)) is not None:
            message = tensor_parallel._decode(payload)
            with meeting.turn:
                if isinstance(message, Bind):
                    runner.bind(np.zeros((message.rows, message.columns), np.int32))
                    continue
                wait = runner.launch(plans.unpack(message))
                if before is not None:
                    before()
                before = wait
    except BaseException as error:
        problems.append(error)
        meeting.barrier.abort()


def both(folder, act):
    """What `act(engine)` gives on one rank and on two, what the two met for, and how many paths were told each step."""
    alone = act(Engine(make(folder, None), chunk=23, rows=8, max_model_len=128))
    meeting, told, problems = Meeting(2), Told(), []
    groups = [BatonGroup(Shard(rank, 2), meeting) for rank in range(2)]
    runners = [make(folder, group) for group in groups]
    thread = threading.Thread(target=follower, args=(runners[1], told, meeting, problems))
    thread.start()
    together = None
    try:
        with meeting.turn:
            together = act(Engine(Leader(runners[0], told), chunk=23, rows=8, max_model_len=128))
    except BaseException:
        if not problems:
            raise
    finally:
        told.messages.put(None)
        thread.join()
    if problems:
        raise problems[0]
    assert groups[0].kinds == groups[1].kinds
    assert runners[0].read_keys == runners[1].read_keys
    return alone, together, groups[0].kinds, told.paths


def traffic(engine):
    """Greedy, drawn, penalized and scored requests that share prefixes, end early and come while others run."""
    rng = random.Random(4)
    shared = prompts(1, 30, 30, vocab_size=100)[0]
    kinds = [
        GREEDY,
        Sampling(temperature=1.0, seed=3, top_p=0.9, ignore_eos=True),
        Sampling(temperature=0.0, repetition_penalty=1.3, ignore_eos=True),
        Sampling(temperature=0.8, seed=1, logprobs=2, ignore_eos=True),
    ]
    for n, tail in enumerate(prompts(9, 1, 20, vocab_size=100, seed=9)):
        sampling = msgspec.structs.replace(kinds[n % len(kinds)], max_tokens=rng.randint(1, 5))
        engine.add((shared if n % 3 else []) + tail, sampling, score_from=5 if n % 5 == 4 else None)
        for _ in range(rng.randint(0, 3)):
            engine.step()
        if n == 5:
            engine.scheduler.abort(n)
    engine.finish()
    return {i: [t for o in outputs for t in o.tokens] for i, outputs in engine.outputs.items()}


MIXED = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
MAMBA = {"num_hidden_layers": 2, "mamba_n_heads": 4, "mamba_d_state": 16, "ssm_state_size": 16}
CHANGES = {
    "mistral": {"sliding_window": 16},
    "gpt_oss": {"layer_types": ["full_attention"]},
    "deepseek_v3": {"num_key_value_heads": 4, "first_k_dense_replace": 0, "n_routed_experts": 4, "n_group": 2}
    | {"topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "deepseek_v32": INDEXED | {"n_group": 4, "topk_group": 2, "index_topk": 44},
    "minimax_m2": {"rotary_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma3_text": {"layer_types": ["full_attention"]},
    "gemma4_text": MIXED | {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 100},
    "granitemoehybrid": GRANITE_MOE | GRANITE_HYBRID | MAMBA | {"layer_types": ["mamba", "attention"]},
    "nemotron_h": NEMOTRON | MAMBA | {"layers_block_type": ["mamba", "attention", "mlp"], "num_hidden_layers": 3},
    "mimo_v2_flash": MIXED | {"head_dim": 24, "moe_intermediate_size": 24},
}


@pytest.mark.parametrize("family", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in CHANGES)])
@pytest.mark.timeout(300)  # the interpreter is slow
def test_two_ranks_are_one(family, tmp_path):
    """Of a vocabulary that does not divide: what is gathered has columns behind the last token id."""
    make_model(tmp_path, family, **SIZES | {"vocab_size": 100, "num_hidden_layers": 1} | CHANGES.get(family, {}))
    alone, together, kinds, paths = both(tmp_path, traffic)
    assert together == alone
    assert kinds.count("broadcast") and kinds.count("gather") > kinds.count("broadcast")
    assert 0 in paths and (family == "mistral" or max(paths) > 1), "paths are told once"


@pytest.mark.slow
def test_two_ranks_verify_drafts(tmp_path):
    """A request has several rows in a step, of which each rank makes the same work."""
    make_model(tmp_path, "llama", **SIZES | {"num_hidden_layers": 1})
    shared = prompts(1, 20, 20, vocab_size=100)[0]
    asked = [shared + tail for tail in prompts(3, 1, 9, vocab_size=100, seed=1)]

    def act(engine):
        sampling = msgspec.structs.replace(GREEDY, max_tokens=8)
        plain = engine.generate(asked, sampling)
        drafter = drafting.Told(True, [prompt + tokens for prompt, tokens in zip(asked, plain, strict=True)])
        engine.scheduler.drafter = drafter
        return plain, engine.generate(asked, sampling), drafter.drafted, drafter.accepted

    alone, together, _, paths = both(tmp_path, act)
    assert alone == together and alone[0] == alone[1]
    assert together[2] > together[3] > 5 and max(paths) > 3


@pytest.mark.parametrize("vocab_size", [128, 64])
def test_greedy_steps_gather_no_logits(tmp_path, vocab_size):
    """Of 64 token ids rank 1 has none."""
    make_model(tmp_path, "llama", **SIZES | {"vocab_size": vocab_size, "num_hidden_layers": 1})
    asked = msgspec.structs.replace(GREEDY, max_tokens=4)

    def act(engine):
        return [engine.generate([p], asked) for p in prompts(2, 5, 9, vocab_size=vocab_size)]

    alone, together, kinds, _ = both(tmp_path, act)
    assert alone == together
    assert kinds.count("gather") == kinds.count("broadcast"), "one of what is largest, a step"
