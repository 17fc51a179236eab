"""The documentation leads somewhere: links, anchors, commands, files. No generator is needed for that."""

from __future__ import annotations

import argparse
import re
import shlex
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench.agents.__main__ import make_parser
from radixrt import cli
from tests.documents import PAGES, ROOT, anchors, blocks, commands, links, name_of

README = ROOT / "README.md"
DOCS = [page for page in PAGES if page.parent == ROOT / "docs"]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
OTHERS_FLAGS = set(  # of pip, docker, other servers, aiperf and our benchmarks
    """--help --index-url --enable-prompt-tokens-details --enable-cache-report --enable-hierarchical-cache
    --lenient --rivals --serve --url --rm --network --gpus --target --build-arg --detach
    --scenario --input-file --custom-dataset-type --unsafe-override --use-server-token-count --session-header
    --concurrency --trajectory-start-min-ratio --trajectory-start-max-ratio --random-seed
    --benchmark-duration""".split()
)
MODEL_FILES = {"config.json", "generation_config.json"}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    for target, anchor in links(page):
        assert target.exists(), target
        assert not anchor or anchor in anchors(target), f"{name_of(page)}: {target.name}#{anchor}"


def test_pages_are_linked_as_they_should_be() -> None:
    """Enough links are found, and every page is in the index, in its table and its tree."""
    assert sum(len(links(page)) for page in PAGES) > 100 and len(links(README)) >= 15
    index = ROOT / "docs/index.md"
    others = {page for page in DOCS if page != index}
    assert {target for target, _ in links(index)} >= others
    trees = "\n".join(blocks(index, "{toctree}")).split()
    assert {name for name in trees if not name.startswith(":")} >= {page.stem for page in others}


def test_the_readme_can_be_read_at_once() -> None:
    assert len(README.read_text().splitlines()) <= 120


def test_results_that_pages_name_are_there() -> None:
    text = "".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"`(?:bench/results/)?(\w+\.json)`", text)) - MODEL_FILES
    assert len(named) > 10 and not {name for name in named if not (ROOT / "bench/results" / name).exists()}


def commands_of_radixrt() -> dict[str, argparse.ArgumentParser]:
    (found,) = (a for a in cli.build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return found.choices


def test_flags_that_pages_name_exist() -> None:
    parsers = [*commands_of_radixrt().values(), make_parser()]
    known = {flag for parser in parsers for flag in parser._option_string_actions} | OTHERS_FLAGS
    for page in [README, *DOCS]:
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z](?!-)", page.read_text())) <= known, page.name


def test_names_for_users_of_other_servers_are_of_one_flag_a_row() -> None:
    section = (
        (ROOT / "docs/operations.md").read_text().partition("### Coming from vLLM or SGLang")[2].partition("\n#")[0]
    )
    rows = [re.findall(r"`(-[^`]+)`", row) for row in re.findall(r"^\| .* \| (`-.*) \|$", section, re.MULTILINE)]
    known = commands_of_radixrt()["serve"]._option_string_actions
    assert len(rows) >= 10
    for names in rows:
        assert len(names) > 1 and len({known[name].dest for name in names}) == 1, names


def check(command: str) -> None:
    """That a command of a page can be given: its program, its flags, its files. AssertionError if not."""
    words = [word for word in shlex.split(command, comments=True) if not re.match(r"[A-Z_]+=", word)]
    match words:
        case ["radixrt", *arguments]:
            cli.build_parser().parse_args(arguments)
        case ["make", *targets]:
            assert set(targets) <= TARGETS
        case ["python", "-m", module, *_]:
            assert find_spec(module) is not None
        case ["pip", "install", *what]:
            assert {extra for word in what for extra in re.findall(r"\[(\w+)\]", word)} <= EXTRAS.keys()
        case ["docker", *arguments]:
            assert all((ROOT / word).exists() for word in arguments if word.endswith(".yaml"))
        case [("curl" | "python3" | "." | "aiperf"), *_]:
            pass
        case _:
            raise AssertionError(f"an unknown command: {command}")


@pytest.mark.parametrize("page", [README, *DOCS], ids=name_of)
def test_commands_can_be_given(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in commands(page):
        for part in command.split(" && "):
            try:
                check(part)
            except SystemExit:
                pytest.fail(f"{command}: {capsys.readouterr().err}")


def test_a_command_with_a_flag_that_there_is_not_is_found() -> None:
    with pytest.raises(SystemExit):
        check("radixrt serve nano --no-such-flag")
    with pytest.raises(AssertionError):
        check("pip install '.[nothing]'")
