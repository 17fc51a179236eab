"""LoRA adapters that are loaded, replaced and unloaded: what workers and clients are told, event by event."""

from __future__ import annotations

import pytest
from sim_workers import ids, register

from radixrt.config import RouterConfig
from radixrt.messages import (
    Adapter,
    AdapterLoaded,
    ChangeAdapter,
    Error,
    Info,
    LoadAdapter,
    Namespace,
    Output,
    Register,
    Run,
    UnloadAdapter,
)
from radixrt.requests.validate import Refused
from radixrt.router.core.core import RouterCore
from radixrt.router.core.effects import Order, Reply
from radixrt.router.server import status
from tests.router.test_core import error, generate, only_run, step

ADMIN = b"admin"


def worker(name: str, *adapters: Adapter, max_loras: int = 2, **fields) -> Register:
    return register(name, adapters=list(adapters), max_loras=max_loras, **fields)


def core_with(*workers: Register, **config) -> RouterCore:
    core = RouterCore(RouterConfig(allow_runtime_lora_updating=True, **config))
    for info in workers:
        core.register(info, 0.0)
    return core


def change(core: RouterCore, name="sql", path="/a", at=1000, id=1, key="", **fields):
    return core.change_adapter(ADMIN, ChangeAdapter(id=id, name=name, path=path, api_key=key, **fields), at)


def orders(effects, kind) -> dict[str, object]:
    """The messages of a kind, by worker."""
    return {e.name: e.message for e in effects if isinstance(e, Order) and isinstance(e.message, kind)}


def reply(effects):
    (found,) = [e.message for e in effects if isinstance(e, Reply) and e.client == ADMIN]
    return found


def answer(core: RouterCore, effects, **errors: str):
    """All workers that were told to load an adapter answer; returns what follows."""
    found = []
    for name, message in orders(effects, LoadAdapter).items():
        found += core.adapter_loaded(name, AdapterLoaded(message.adapter, errors.get(name, "")), 1.0)
    return found


def load(core: RouterCore, *args, **fields):
    return answer(core, change(core, *args, **fields))


def asked(core: RouterCore, model="sql", id=7) -> tuple[str, Run]:
    return only_run(core.submit(b"c", generate(id, ids(id, 2, 3), model=model), 1.0))


def refused(effects) -> Error:
    message = reply(effects)
    assert isinstance(message, Error), message
    return message


def test_all_workers_load_it_and_then_it_is_a_model():
    core = core_with(worker("w0"), worker("w1"))
    told = orders(change(core, at=1000), LoadAdapter)
    assert told == dict.fromkeys(("w0", "w1"), LoadAdapter(Adapter("sql", 1000, "/a")))
    assert error(core.submit(b"c", generate(1, model="sql"), 1.0)).code == 404
    assert core.adapter_loaded("w0", AdapterLoaded(Adapter("sql", 1000, "/a")), 1.0) == []
    name, run = asked(core)
    assert (name, run.adapter, run.version) == ("w0", "sql", 1000), "w1 does not have it yet"
    assert reply(core.adapter_loaded("w1", AdapterLoaded(Adapter("sql", 1000, "/a")), 1.0)) == Info(1, {})
    assert asked(core, id=8)[0] == "w1"
    assert [model["id"] for model in status.models(core)] == ["m", "sql"]
    assert status.models(core)[1]["parent"] == "m"


def test_each_version_has_prefixes_of_its_own():
    core = core_with(worker("w0", Adapter("sql")))
    _, first = asked(core, id=1)
    load(core, in_place=True, at=1000)
    _, second = asked(core, id=2)
    load(core, in_place=True, at=1000)
    _, third = asked(core, id=3)
    assert (first.version, second.version, third.version) == (0, 1000, 1001), "even in the same millisecond"
    assert len({first.namespace, second.namespace, third.namespace}) == 3
    assert [Namespace.of(run.namespace).version for run in (first, second, third)] == [0, 1000, 1001]
    assert asked(core, "m", 4)[1].version == 0


def test_requests_get_the_former_version_until_a_worker_has_the_new_one():
    core = core_with(worker("w0", Adapter("sql")), worker("w1", Adapter("sql")))
    told = change(core, in_place=True, at=5)
    assert asked(core, id=1)[1].version == 0
    new = orders(told, LoadAdapter)["w1"].adapter
    assert core.adapter_loaded("w1", AdapterLoaded(new), 1.0) == []
    assert [asked(core, id=id)[0] for id in (2, 3)] == ["w1", "w1"]
    done = core.adapter_loaded("w0", AdapterLoaded(new), 1.0)
    assert orders(done, UnloadAdapter) == dict.fromkeys(("w0", "w1"), UnloadAdapter("sql", 0))
    assert reply(done) == Info(1, {})


def test_it_is_replaced_only_in_place():
    core = core_with(worker("w0"))
    load(core)
    problem = refused(change(core))
    assert (problem.code, problem.field) == (400, "name") and "already been loaded; load_inplace" in problem.message
    assert asked(core)[1].version == 1000


def test_what_no_worker_can_load_changes_nothing():
    core = core_with(worker("w0", Adapter("sql")), worker("w1", Adapter("sql")))
    done = answer(core, change(core, in_place=True), w0="sql: it is broken", w1="sql: it is broken")
    assert (refused(done).code, refused(done).message) == (400, "sql: it is broken")
    assert orders(done, UnloadAdapter) == {} and asked(core)[1].version == 0


def test_workers_that_cannot_load_it_do_not_serve_it():
    core = core_with(worker("w0", Adapter("sql")), worker("w1", Adapter("sql")))
    done = answer(core, change(core, in_place=True), w0="sql: there is no folder /a")
    assert reply(done) == Info(1, {"w0": "sql: there is no folder /a"})
    assert orders(done, UnloadAdapter)["w0"] == UnloadAdapter("sql", 0), "it has the former one, which nobody gets"
    assert [asked(core, id=id)[0] for id in range(3)] == ["w1"] * 3


def test_unloaded_it_is_no_model():
    core = core_with(worker("w0", Adapter("sql")), worker("w1"))
    load(core, in_place=True)
    done = change(core, path="")
    assert reply(done) == Info(1, {}) and set(orders(done, UnloadAdapter)) == {"w0", "w1"}
    assert error(core.submit(b"c", generate(1, model="sql"), 1.0)).code == 404
    assert [model["id"] for model in status.models(core)] == ["m"]
    assert refused(change(core, path="")).code == 404
    load(core, at=1)
    assert asked(core)[1].version > 1000, "not that of its first life"


def test_a_load_beyond_the_slots_is_refused():
    core = core_with(worker("w0"), worker("w1"))
    load(core, "a")
    load(core, "b")
    problem = refused(change(core, "c"))
    assert problem.code == 400
    assert problem.message == "2 LoRA adapters are loaded (a, b), as many as --max-loras allows"
    assert reply(load(core, "b", in_place=True)) == Info(1, {}), "replacing one needs no more"
    change(core, "a", path="")
    assert reply(load(core, "c")) == Info(1, {})


def test_a_worker_without_a_slot_is_left_out():
    core = core_with(worker("w0", Adapter("x"), max_loras=1), worker("w1"), register("w2"))
    assert set(orders(change(core), LoadAdapter)) == {"w1"}


@pytest.mark.parametrize("name", ["", "two\nlines", "\x1f", "m", "default", "x" * 300])
def test_names_that_cannot_be_an_adapters(name):
    core = core_with(worker("w0"), served_model_name="default")
    for path in ("/a", ""):
        problem = refused(change(core, name, path))
        assert (problem.code, problem.field) == (400, "name")


def test_changes_are_made_one_after_the_other():
    core = core_with(worker("w0"))
    first = change(core, id=1)
    assert change(core, id=2) == [] and change(core, path="", id=3) == [] and change(core, "b", "/b", id=4) == []
    done = answer(core, first)
    replies = {e.message.id: e.message for e in done if isinstance(e, Reply)}
    assert isinstance(replies[1], Info) and isinstance(replies[3], Info)
    assert "already been loaded" in replies[2].message, "as it was when its turn came"
    assert set(orders(done, UnloadAdapter)) == {"w0"}
    assert reply(answer(core, done)) == Info(4, {})


# ---------------------------------------------------------------- workers that come and go


def test_a_worker_that_joins_gets_what_is_loaded_now():
    """It has the adapters of its own start: one was replaced since, one unloaded."""
    core = core_with(worker("w0", Adapter("sql"), Adapter("bot")))
    load(core, in_place=True, at=1000)
    change(core, "bot", path="")
    effects = core.register(worker("w1", Adapter("sql"), Adapter("bot")), 1.0)
    told = [e.message for e in effects if e.name == "w1"]
    assert told == [UnloadAdapter("bot", 0), UnloadAdapter("sql", 0), LoadAdapter(Adapter("sql", 1000, "/a"))]
    core.leave("w0", 1.0)
    assert error(core.submit(b"c", generate(1, model="sql"), 1.0)).code == 503, "it will have it soon"
    core.adapter_loaded("w1", AdapterLoaded(Adapter("sql", 1000, "/a")), 1.0)
    assert asked(core)[0] == "w1"


def test_a_run_waits_until_the_worker_has_loaded_its_adapter_again():
    core = core_with(worker("w0"))
    load(core)
    asked(core)
    assert core.leave("w0", 1.0) == []
    told = core.register(worker("w0", pid=2), 2.0)
    assert set(orders(told, LoadAdapter)) == {"w0"} and orders(told, Run) == {}
    name, run = only_run(core.adapter_loaded("w0", AdapterLoaded(Adapter("sql", 1000, "/a")), 3.0))
    assert (name, run.version) == ("w0", 1000)


def test_a_run_never_goes_on_with_other_weights():
    """Its worker is lost after its adapter was replaced: it fails, and the client can ask again."""
    core = core_with(worker("w0"))
    load(core)
    _, run = asked(core)
    core.step("w0", step(Output(run.id, [9])), 1.0)
    load(core, in_place=True, at=2000)
    (delta,) = core.step("w0", step(Output(run.id, [10])), 1.0)
    assert delta.message.items[0].ids == ids(10), "as long as its worker is there it goes on"
    core.leave("w0", 2.0)
    core.register(worker("w1", Adapter("sql", 2000, "/a")), 2.0)
    (failure,) = [e.message for e in core.tick(3.0) if isinstance(e, Reply) and e.client == b"c"]
    assert (failure.code, failure.retry_after) == (503, 1.0) and "was replaced" in failure.message
    assert core.runs_in_flight == 0


def test_a_worker_that_is_lost_while_it_loads_is_not_waited_for():
    core = core_with(worker("w0"), worker("w1"))
    told = orders(change(core), LoadAdapter)
    assert core.adapter_loaded("w1", AdapterLoaded(told["w1"].adapter), 1.0) == []
    core.leave("w0", 1.0)
    assert reply(core.tick(1.0)) == Info(1, {})


def test_if_all_are_lost_the_client_is_told():
    core = core_with(worker("w0"))
    change(core)
    core.leave("w0", 1.0)
    assert refused(core.tick(1.0)).code == 503
    assert refused(change(core)).code == 503


def test_a_version_that_came_to_nothing_is_not_used_again():
    """A worker may have it all the same, from another folder."""
    core = core_with(worker("w0"))
    failed = orders(change(core), LoadAdapter)["w0"].adapter
    core.lose(["w0"], 1.0)
    assert refused(core.tick(1.0)).code == 503
    core.heartbeat("w0", 2.0)
    assert orders(change(core, path="/b"), LoadAdapter)["w0"].adapter.version > failed.version


def test_a_lost_worker_comes_back_with_what_it_had():
    core = core_with(worker("w0"), worker("w1"))
    load(core)
    core.lose(["w1"], 1.0)
    change(core, path="")
    load(core, "b", at=5000)
    told = [e.message for e in core.heartbeat("w1", 2.0) if isinstance(e.message, LoadAdapter | UnloadAdapter)]
    assert told == [UnloadAdapter("sql", 1000), LoadAdapter(Adapter("b", 5000, "/a"))]


@pytest.mark.parametrize("is_over", [True, False])
def test_a_lost_worker_comes_back_with_what_it_has_loaded_meanwhile(is_over):
    """What nobody waits for any more must not keep a slot."""
    core = core_with(worker("w0"), worker("w1"))
    new = orders(change(core), LoadAdapter)["w0"].adapter
    core.lose(["w0", "w1"], 1.0)
    assert not is_over or refused(core.tick(1.0)).code == 503
    effects = core.adapter_loaded("w0", AdapterLoaded(new), 2.0)
    assert is_over == (orders(effects, UnloadAdapter) == {"w0": UnloadAdapter("sql", new.version)})
    effects += core.tick(2.0)
    assert core.workers.version("sql") == 0 and orders(effects, UnloadAdapter)["w0"].version == new.version


def test_a_worker_never_gets_more_than_it_has_room_for():
    core = core_with(worker("w0", max_loras=1), worker("w1", max_loras=2))
    load(core, "a")
    assert list(orders(change(core, "b", at=5000), LoadAdapter)) == ["w1"]
    new = core.workers.wanted
    effects = core.adapter_loaded("w1", AdapterLoaded(Adapter("b", 5000, "/a")), 1.0)
    assert "b" in new and orders(effects, LoadAdapter) == {}
    assert orders(core.tick(1.0), LoadAdapter) == {}, "nor later"
    effects = change(core, "a", path="")
    assert orders(effects, LoadAdapter) == {"w0": LoadAdapter(Adapter("b", 5000, "/a"))}, "now there is room"


def test_what_a_worker_could_not_load_keeps_its_place():
    """It is tried again, so another must not take the last slot."""
    core = core_with(worker("w0"), worker("w1"))
    answer(core, change(core, "a"), w0="full disk")
    load(core, "b")
    assert "2 LoRA adapters are loaded (a, b)" in refused(change(core, "c")).message
    again = {"w0": LoadAdapter(Adapter("a", 1000, "/a"))}
    assert [orders(core.tick(now), LoadAdapter) for now in (1.0, 2.0, 3.0)] == [again, {}, {}], "not each second"


def test_a_restarted_router_learns_the_newest_from_workers():
    core = core_with(worker("w0", Adapter("sql", 1000, "/a")))
    assert asked(core)[1].version == 1000
    told = core.register(worker("w1", Adapter("sql", 2000, "/b")), 1.0)
    assert [e.message for e in told if e.name == "w0"][:2] == [
        UnloadAdapter("sql", 1000), LoadAdapter(Adapter("sql", 2000, "/b"))
    ]  # fmt: skip
    name, run = asked(core, id=8)
    assert (name, run.version) == ("w1", 2000)
    load(core, in_place=True, at=5)
    assert asked(core, id=9)[1].version > 2000, "even if the clock is behind"


# ---------------------------------------------------------------- who may


def test_it_is_off_unless_it_is_allowed():
    core = RouterCore(RouterConfig())
    core.register(worker("w0"), 0.0)
    with pytest.raises(Refused, match="--allow-runtime-lora-updating is off") as refusal:
        change(core)
    assert refusal.value.code == 403
    core = core_with(register("w0"))
    assert refused(change(core)).code == 403, "the workers do not allow it"


@pytest.mark.parametrize(
    ("keys", "admin", "key", "code"),
    [
        ((), "", "", None),
        ((), "", "anything", None),
        (("a:k1",), "", "k1", 403),
        (("a:k1",), "", "", 401),
        (("a:k1",), "root", "k1", 403),
        (("a:k1",), "root", "other", 401),
        (("a:k1",), "root", "root", None),
        ((), "root", "", 401),
        ((), "root", "root", None),
    ],
)
def test_whose_key_it_takes(keys, admin, key, code):
    core = core_with(worker("w0"), api_key=keys, admin_api_key=admin)
    if code is None:
        assert orders(change(core, key=key), LoadAdapter)
    else:
        with pytest.raises(Refused) as refusal:
            change(core, key=key)
        assert refusal.value.code == code


def test_the_admins_key_is_no_tenants():
    core = core_with(worker("w0"), api_key=("a:k1",), admin_api_key="root")
    assert error(core.submit(b"c", generate(1, api_key="root"), 1.0)).code == 401
    with pytest.raises(ValueError, match="--admin-api-key is the key of a tenant"):
        core_with(api_key=("a:k1",), admin_api_key="k1")
