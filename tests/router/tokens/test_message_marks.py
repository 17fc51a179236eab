"""In which message of a rendered chat a token is."""

from __future__ import annotations

from array import array

import pytest

from radixrt.messages import ChatPrompt
from radixrt.tokens import load_tokenizer
from radixrt.tokens.message_marks import MessageMarks
from tests.checkpoints import make_tokenizer

ROLES = ("system", "user", "assistant", "user", "assistant", "user")
TEXTS = ("Be brief.", "one\ntwo", "three", "<|im_start|>user", "<|im_end|>", "six")


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("name", ["chatml", "phi-3-mini"])
def test_each_token_is_in_the_message_whose_text_it_is(name, first, tmp_path, request):
    folder = (
        make_tokenizer(tmp_path) if name == "chatml" else request.getfixturevalue("shared_data") / "tokenizers" / name
    )
    tokenizer = load_tokenizer(folder)
    messages = [{"role": role, "content": text} for role, text in zip(ROLES, TEXTS, strict=True)][first:]
    ids = tokenizer.encode(tokenizer.apply_chat(ChatPrompt(messages), answer_next=False), add_special_tokens=False)
    found = [MessageMarks(tokenizer).at(array("i", ids).tobytes(), at) for at in range(len(ids))]
    assert list(dict.fromkeys(found)) == list(enumerate(ROLES[first:]))


def test_without_a_template_nothing_is_known(tmp_path):
    folder = make_tokenizer(tmp_path)
    config = (folder / "tokenizer_config.json").read_text()
    (folder / "tokenizer_config.json").write_text(config.replace("chat_template", "other"))
    for tokenizer in (load_tokenizer(folder), None):
        assert MessageMarks(tokenizer).at(array("i", [1, 2, 3]).tobytes(), 1) is None
