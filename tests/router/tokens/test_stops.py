"""Stop strings against a search of the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.tokens.stops import LoudStopFinder, Quiet, StopFinder


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Of all occurrences the one that ends first, the longest of those."""
    found = [
        (start + len(stop), -len(stop), stop)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start)
    ]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end if include else end - len(stop)], stop


def held(text: str, stops: list[str]) -> int:
    """Characters at the end of `text` that may begin a stop."""
    lengths = [n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])]
    return max(lengths, default=0)


ALPHABET = st.sampled_from("ab\n")


@settings(deadline=None, derandomize=True, max_examples=500)
@given(
    text=st.text(ALPHABET, max_size=24),
    stops=st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 24), max_size=12),
    include=st.booleans(),
)
def test_equals_a_search_of_the_whole_text(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    finder, out, fed = StopFinder(stops, include), "", 0
    for cut in [*sorted(cuts), len(text)]:
        chunk = text[fed : max(fed, cut)]
        fed += len(chunk)
        out += finder.push(chunk)
        expected, stop = naive(text[:fed], stops, include)
        assert finder.found == stop
        if stop is None:
            assert out == text[: fed if include else fed - held(text[:fed], stops)]
        else:
            assert out == expected
    assert (out + finder.flush(), finder.found) == naive(text, stops, include)


def test_nothing_follows_a_stop() -> None:
    finder = StopFinder(["END"])
    assert finder.push("text EN") == "text "
    assert finder.push("D more") == ""
    assert finder.found == "END"
    assert finder.push("even more") == ""
    assert finder.flush() == ""
    assert finder.found == "END"


def test_what_began_no_stop_is_text() -> None:
    finder = StopFinder(["\nObservation:"])
    assert finder.push("a\nObserv") == "a"
    assert finder.push("e\n") == "\nObserve"
    assert finder.flush() == "\n"
    assert finder.found is None


THOUGHTS = Quiet("<t>", "</t>")


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("quiet", "text", "expected"),
    [
        (THOUGHTS, "\n<t>a END</t>b END c", "\n<t>a END</t>b "),
        (THOUGHTS, "a <t>b END</t>", "a <t>b "),
        (THOUGHTS, " <t", " <t"),
        (THOUGHTS, "<t>a END b</", "<t>a END b</"),
        (THOUGHTS, "<t>a</t><t>END", "<t>a</t><t>"),
        (THOUGHTS, "EN<t>D END c", "EN<t>D "),
        (THOUGHTS._replace(inside=True), "a END</t>EN <t>END", "a END</t>EN <t>"),
        (THOUGHTS._replace(anywhere=True), "a<t>END</t>EN<t>D</t>b END", "a<t>END</t>EN<t>D</t>b "),
        (THOUGHTS._replace(inside=True, anywhere=True), "END</t>a<t>END</t>END", "END</t>a<t>END</t>"),
    ],
)
def test_quiet_parts_are_not_searched(quiet: Quiet, text: str, expected: str, size: int) -> None:
    finder = LoudStopFinder(StopFinder(["END"]), quiet)
    said = [finder.push(text[at : at + size]) for at in range(0, len(text), size)]
    assert "".join(said) + finder.flush() == expected
    assert finder.found == ("END" if expected != text else None)
