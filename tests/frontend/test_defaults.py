"""How tokens are drawn where a request does not say, as generation_config.json has it."""

from __future__ import annotations

import json
import logging

import httpx
import pytest

from radixrt.frontend.generate.defaults import sampling_defaults
from tests.frontend import scripted as scripted_module
from tests.frontend.scripted import make_family, scripted

QWEN3 = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": [1], "max_new_tokens": 9}


def test_what_the_file_says_of_sampling():
    assert sampling_defaults("auto", QWEN3) == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert sampling_defaults("none", QWEN3) == {} == sampling_defaults("auto", {})
    assert sampling_defaults("auto", {"temperature": 1.0, "top_p": None, "repetition_penalty": 1.05}) == {
        "repetition_penalty": 1.05
    }


@pytest.mark.parametrize(("name", "value"), [("temperature", -1), ("top_p", "0.9"), ("top_k", 2.5), ("min_p", True)])
def test_what_no_request_could_have_is_left_out(name, value, caplog):
    with caplog.at_level(logging.WARNING):
        assert sampling_defaults("auto", {name: value, "repetition_penalty": 1.1}) == {"repetition_penalty": 1.1}
    assert name in caplog.text and "not used" in caplog.text


BODIES = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
    "/api/chat": {"messages": [{"role": "user", "content": "hello"}]},
    "/api/generate": {"prompt": "hello"},
}


@pytest.mark.parametrize("setting", ["auto", "none"])
def test_every_api_has_them_and_a_request_goes_before(setting, tmp_path, monkeypatch):
    def make(folder, family):
        make_family(folder, family)
        (folder / "generation_config.json").write_text(json.dumps(QWEN3))

    monkeypatch.setattr(scripted_module, "make_family", make)
    left_open = (0.6, 0.95, 20) if setting == "auto" else (1.0, 1.0, 0)
    with scripted("hermes", tmp_path, generation_config=setting) as model:
        for path, body in BODIES.items():
            for given in ({}, {"temperature": 0.25, "top_p": 0.5}):
                model.says("fine")
                reply = httpx.post(model.url + path, json={"model": "m"} | body | given)
                (drawn,) = model.script.samplings
                expected = left_open if not given else (0.25, 0.5, left_open[2])
                assert reply.status_code == 200 and (drawn.temperature, drawn.top_p, drawn.top_k) == expected, path
                if path == "/v1/responses":
                    assert (reply.json()["temperature"], reply.json()["top_p"]) == expected[:2]
