"""Processes are killed and stopped under load: every answer that comes is the undisturbed one, every request ends, and
nothing is left behind."""

from __future__ import annotations

import random

import psutil
import pytest

from tests.chaos.conftest import Notes, seconds
from tests.chaos.corpus import Kinds
from tests.chaos.processes import Recorder, Sample, sample
from tests.chaos.runs import Traffic, undisturbed
from tests.chaos.stack import FAKE, Serve
from tests.chaos.storm import Storm, lives
from tests.chaos.test_fuzz import fuzz_http
from tests.chaos.traffic import make_jobs
from tests.waiting import eventually

MORE_DESCRIPTORS, MORE_THREADS = 12, 4
"""What a process may have more than before the storm: a connection that lingers, a pool's thread."""


@pytest.mark.chaos
@pytest.mark.timeout(400)
def test_a_storm_changes_no_answer(tmp_path, seed, notes):
    """Workers without a model, which check each prefix that they read."""
    serve, storm_seconds = Serve(tmp_path, *FAKE), seconds(75)
    survive(serve, Storm(serve, random.Random(seed)), seed, notes, storm_seconds, jobs=6, formula=True)


@pytest.mark.chaos
@pytest.mark.timeout(400)
def test_a_storm_changes_no_answer_of_a_model(tmp_path, seed, notes):
    flags = ("--device", "cpu", "--deterministic", "--check", "--max-total-tokens", "12000", "--max-model-len", "3000")
    serve = Serve(tmp_path, *flags, workers=3)
    storm = Storm(serve, random.Random(seed), pace=2.5)
    survive(serve, storm, seed, notes, seconds(45), jobs=2, formula=False, at_once=4)


def survive(
    serve: Serve, storm: Storm, seed: int, notes: Notes, duration: float, *, jobs: int, formula: bool, at_once: int = 8
) -> None:
    work = make_jobs(random.Random(seed), list(serve.tenants), jobs, turns_compare=not formula)
    with serve:
        known = undisturbed(serve, work, formula=formula)
        before = resources(serve)
        recorder = Recorder(lambda: serve.pid)
        try:
            with Traffic(serve, work, known, seed, at_once) as traffic:
                storm.blow(duration, calm_after=duration / 3)
                serve.wait_whole()
        finally:
            storm.settle()
            series = recorder.stop()
            for event, count in sorted(storm.events.items()):
                notes.add(event, count)
            notes.add("exit codes of stacks", storm.codes)
            notes.add("requests answered", dict(traffic.tally.done))
            notes.add("attempts that were made again", dict(traffic.tally.retries))
            notes.add("tokens compared", traffic.tally.tokens)
            notes.add("slowest request, retries included", f"{traffic.slowest:.1f} s")
            notes.add_processes(series, most=16)
        serve.check_idle()
        eventually(lambda: not more(before, resources(serve)), 30)
        assert not lost_sockets(serve)
        assert not serve.bad_lines(), serve.bad_lines()[0]
        pids = serve.pids() | set(series)
        assert serve.stop() == 0
        assert not [pid for pid in pids if lives(pid)]


def resources(serve: Serve) -> dict[str, Sample]:
    """The process of each role with the most descriptors."""
    found = {}
    for role in ("serve", "router", "worker", "frontend"):
        samples = [one for process in serve.processes(role) if (one := sample(process))]
        if samples:
            found[role] = max(samples, key=lambda one: one.descriptors)
    return found


def more(before: dict[str, Sample], after: dict[str, Sample]) -> list[str]:
    """Roles that have clearly more descriptors or threads than before."""
    return [
        f"{role}: {then} -> {after[role]}"
        for role, then in before.items()
        if role not in after
        or after[role].descriptors > then.descriptors + MORE_DESCRIPTORS
        or after[role].threads > then.threads + MORE_THREADS
    ]


def lost_sockets(serve: Serve) -> list[str]:
    """Connections that the other side has closed, and ours has not."""
    processes = [one for role in ("serve", "router", "worker", "frontend") for one in serve.processes(role)]
    return [
        f"{one.pid} {link.laddr}"
        for one in processes
        for link in one.net_connections("tcp")
        if link.status == psutil.CONN_CLOSE_WAIT
    ]


def test_a_short_storm_changes_no_answer(tmp_path, fixed_seed, notes):
    """The short form: a worker is stopped for a moment; the other one is killed while mutated requests arrive."""
    flags = ("--fake", "0,0.0002", "--check", "--max-total-tokens", "20000", "--max-model-len", "1300")
    with Serve(tmp_path, *flags, workers=2, frontends=1) as serve:
        rng = random.Random(fixed_seed)
        work = [job for job in make_jobs(rng, list(serve.tenants), 2, turns_compare=False) if job.truth is not None]
        first, second = serve.processes("worker")
        with Traffic(serve, work, {job.name: job.truth for job in work}, fixed_seed, at_once=4) as traffic:
            traffic.wait(lambda tally: tally.done.total() >= 5)
            first.suspend()
            traffic.wait(lambda tally: tally.done.total() >= 10, 0.3)
            first.resume()
            second.kill()
            fuzz_http(serve.port, serve.tenants["red"], rng, 50, notes, Kinds(grammars=False))
            before = traffic.tally.done.total()
            traffic.wait(lambda tally: tally.done.total() >= before + 5)
        notes.add("requests answered", traffic.tally.done.total())
        serve.check_idle()
        assert not serve.bad_lines(), serve.bad_lines()[0]
