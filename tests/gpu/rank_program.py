"""Writes what a worker of several GPUs generates, as JSON. A process can have only one group of GPUs, so each worker is
tested in a process of its own.

python -m tests.gpu.rank_program FOLDER RANKS OUT SETTINGS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from radixrt.config import WorkerConfig, resolve
from radixrt.messages import Sampling
from radixrt.worker.load.runner import load_runner
from tests.worker.engine import Engine, prompts
from tests.worker.test_drafting import Told

DRAWN = Sampling(max_tokens=24, temperature=1.0, seed=5, top_p=0.9, ignore_eos=True)
PENALIZED = Sampling(max_tokens=24, temperature=0.0, repetition_penalty=1.2, logprobs=1, ignore_eos=True)


def main(folder: str, ranks: int, out: str, settings: dict[str, object]) -> None:
    """Generates cold and warm, in a batch and alone, with drafts, with sampling, with penalties; and scores prompts."""
    config = {"device": "cuda", "dtype": "bfloat16", "max_total_tokens": 65_536, "max_num_seqs": 16} | settings
    config.setdefault("kv_offloading_size", "1")
    worker = resolve(WorkerConfig(model=folder, tensor_parallel_size=ranks, **config))
    runner = load_runner(worker)
    engine = Engine(runner, chunk=8192, rows=16, max_model_len=4096)
    asked = prompts(16, 20, 300, vocab_size=4096)
    found = {"cold": engine.generate(asked), "warm": engine.generate(asked)}
    found["alone"] = [engine.generate([prompt])[0] for prompt in asked[:4]]
    texts = [prompt + tokens for prompt, tokens in zip(asked, found["cold"], strict=True)]
    engine.scheduler.drafter = Told(True, texts)
    found["drafted"] = engine.generate(asked)
    engine.scheduler.drafter = None
    found["drawn"], found["penalized"] = engine.generate(asked[:8], DRAWN), engine.generate(asked[:8], PENALIZED)
    ids = [engine.add(p, Sampling(max_tokens=0), score_from=1) for p in prompts(6, 100, 300, vocab_size=4096, seed=3)]
    engine.finish()
    found["scores"] = [score for id in ids for output in engine.outputs[id] for score in output.scores or []]
    runner.close()
    if not settings.keys() - {"attention_backend"}:  # another worker in the same process
        runner = load_runner(worker)
        engine = Engine(runner, chunk=8192, rows=16, max_model_len=4096)
        found["again"] = engine.generate(asked)
        runner.close()
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
