"""The live page in a headless browser, on made-up data: `make test-page`."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.page.fake import EVIL, KEY, Fake, serving
from tests.page.world import Tree

pytestmark = pytest.mark.page
sync_api = pytest.importorskip("playwright.sync_api", reason="no browser tests without: pip install playwright")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
NAMES = ("chromium", "chromium-browser", "google-chrome")
WIDTHS = (400, 1400)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    with sync_api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=found, args=ARGUMENTS)
        except sync_api.Error as problem:
            pytest.skip(f"no Chromium (CHROMIUM=PATH names one): {problem.message.splitlines()[0]}")
        yield browser
        browser.close()


class Visit:
    """A page that is open, and what it has asked for and complained of."""

    def __init__(self, page: Any, url: str, fake: Fake) -> None:
        self.page, self.url, self.fake = page, url, fake
        self.complaints: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))

    def open(self) -> Visit:
        self.page.goto(self.url)
        if self.fake.scene not in ("keyed", "old", "silent"):
            self.page.wait_for_selector("body.on")
        return self

    def until(self, expression: str, seconds: float = 10.0) -> None:
        """Wait until JavaScript is true. (Playwright's wait_for_function evaluates strings in the page, whose policy
        forbids that.)"""
        end = time.monotonic() + seconds
        while not self.page.evaluate(expression):
            assert time.monotonic() < end, f"never came: {expression}"
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def tree(self) -> Visit:
        """With the tree in view and loaded."""
        self.page.locator("#icicle").scroll_into_view_if_needed()
        self.until("tree.data && !tree.moving")
        return self

    def click_bar(self, level: int, share: float = 0.05) -> None:
        """Click the bar of a level below the top, at a share of the width; wait until it is at the top."""
        box = self.page.locator("#icicle").bounding_box()
        row = self.page.evaluate("rowHeight(tree.view, $('icicle').clientHeight)")
        self.page.mouse.click(box["x"] + box["width"] * share, box["y"] + (level + 0.5) * row)
        self.until("!tree.moving && !tree.asking")


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Visit]]:
    with ExitStack() as stack:

        def start(scene: str = "busy", width: int = 1400, seconds: float = 0.2, **options: Any) -> Visit:
            fake = Fake(scene, seconds)
            url = stack.enter_context(serving(fake))
            context = browser.new_context(viewport={"width": width, "height": 860}, **options)
            stack.callback(context.close)
            return Visit(context.new_page(), url, fake)

        yield start


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scene", ["busy", "empty", "starting", "hostile", "failing"])
def test_a_page_fits_its_window_and_complains_of_nothing(visit, scene, width):
    page = visit(scene, width).open()
    page.page.wait_for_timeout(400)
    assert page.page.evaluate("document.documentElement.scrollWidth") == width
    assert not page.complaints


def test_a_page_asks_this_server_only(visit):
    page = visit().open().tree()
    page.page.wait_for_timeout(600)
    assert len(page.asked) > 2 and all(url.startswith((page.url, "data:")) for url in page.asked)


def test_figures_are_the_servers(visit):
    page = visit(seconds=60).open()
    totals = page.fake.world.state()["totals"]
    page.page.wait_for_selector("#tiles dd")
    tiles = page.text("#tiles")
    assert f"{totals['hit_rate']:.1%}" in tiles and f"of {totals['bound_rate']:.1%} possible" in tiles
    assert f"{totals['requests']:,}" in tiles
    assert f"{totals['misses']['evicted'] / totals['prompt_tokens']:.1%}" in page.text("#whole-key")


def test_names_and_texts_of_clients_stay_text(visit):
    page = visit("hostile").open()
    page.page.locator("#recent tbody button").first.click()
    page.page.wait_for_selector("#panel .said")
    assert EVIL in page.page.locator("#panel .said").text_content()
    page.page.keyboard.press("Escape")
    page.tree().click_bar(1)
    page.page.wait_for_selector("#node-text:not([hidden])")
    assert EVIL in page.page.locator("#node-text").text_content()
    assert page.page.evaluate("window.hurt") is None and not page.page.locator("img, main script").count()


def test_a_panel_says_why_a_request_missed_and_gives_the_focus_back(visit):
    page = visit().open().page
    page.locator("#lost-requests").click()
    button = page.locator("#recent tbody button").first
    button.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("#panel .split")
    assert re.search(r"diverges at token [\d,]+, in message 3 \(user\)", page.locator("#panel").inner_text())
    assert page.locator("#panel mark").all_inner_texts() == ["2026-09-21T10:44:07Z", "2026-09-21T10:43:59Z"]
    page.keyboard.press("Escape")
    assert not page.locator("#panel").is_visible()
    assert page.evaluate("document.activeElement.closest('#recent') !== null")


def test_a_request_that_is_forgotten_is_said_to_be(visit):
    page = visit().open()
    page.fake.world.explain = lambda number: None
    page.page.locator("#recent tbody button").first.click()
    page.until("$('panel-body').textContent.includes('no longer remembers')")


def test_a_page_asks_for_a_key_until_one_is_right_and_keeps_it_in_its_tab(visit):
    visited = visit("keyed").open()
    page = visited.page
    for key in ("wrong", KEY):
        page.wait_for_selector("#ask[open]")
        page.locator("#key").fill(key)
        page.keyboard.press("Enter")
        if key == "wrong":
            visited.until("$('ask-wrong').textContent.includes('unknown API key')")
    page.wait_for_selector("body.on")
    assert page.evaluate("[...Object.values(localStorage), location.href].join()").count(KEY) == 0
    page.reload()
    page.wait_for_selector("body.on")
    page.locator("#forget").click()
    page.wait_for_selector("#ask[open]")


def test_a_page_says_that_the_server_is_away_and_finds_it_again(visit, browser):
    with ExitStack() as stack:
        url = stack.enter_context(serving(Fake(seconds=0.2)))
        visited = Visit(browser.new_page(), url, Fake("empty")).open()
        page = visited.page
        stack.pop_all().close()
        page.wait_for_selector("#notice:not([hidden])")
        visited.until("$('notice').textContent.includes('does not answer')")
        assert re.search(
            r"Shown is how it was at [\d:]+\. Trying again in \d+ s\.", page.locator("#notice").inner_text()
        )
        stack.enter_context(serving(Fake(seconds=0.2), int(url.rsplit(":")[-1])))
        page.locator("#notice button").click()
        page.wait_for_selector("body.on")
        assert not page.locator("#notice").is_visible()
        page.close()


def test_an_older_server_is_named_as_the_reason(visit):
    page = visit("old").open()
    page.until("$('notice').textContent.includes('no live data')")


def test_a_newcomer_is_told_the_command_with_this_address_and_a_model(visit):
    page = visit("empty").open()
    page.until("$('curl').textContent.includes('coder-32b')")
    assert page.text("#curl").startswith(f"curl {page.url}/v1/chat/completions") and "latency" not in page.text("main")
    assert "Nothing is cached yet" in page.text("#tree")


def test_a_tree_appears_once_something_is_cached(visit):
    page = visit("empty").open()
    page.until("!$('tree-empty').hidden && tree.visible && !tree.asking")
    page.fake.tree = Tree(20_000)
    page.page.evaluate("refreshTree()")  # as every 5 seconds
    page.until("!$('icicle').hidden && tree.data.total > 20_000")


def test_clicks_zoom_into_the_tree_and_keys_out_of_it(visit):
    page = visit().open().tree()
    page.click_bar(2)
    assert page.page.locator("#path li").count() == 3
    assert page.page.evaluate("tree.zoom.id") != "0" and page.fake.asked.count("/v1/live/tree") >= 2
    page.page.locator("#icicle").focus()
    page.page.keyboard.press("Escape")
    page.until("!tree.moving")
    assert page.page.locator("#path li").count() == 2
    page.page.keyboard.press("Home")
    assert page.text("#path") == "whole cache"


def test_keys_walk_the_tree(visit):
    visited = visit(reduced_motion="reduce").open().tree()
    page = visited.page
    page.locator("#icicle").focus()
    for key, where in (("ArrowDown", "1,0"), ("ArrowDown", "2,0"), ("ArrowRight", "2,1"), ("ArrowUp", "1,0")):
        page.keyboard.press(key)
        at = page.evaluate("[tree.chosen.level, tree.chosen.up.children.indexOf(tree.chosen)].join()")
        assert at == where
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert page.evaluate("tree.zoom === tree.chosen && !tree.moving")
    visited.until("$('node-said').textContent.includes('tokens, used')")


def test_a_tree_of_a_million_tokens_is_drawn_well_within_a_frame(visit):
    page = visit().open().tree()
    assert page.page.evaluate("tree.top.total > 1e6 && tree.top.known.size > 1000")
    draw = "(() => { const begun = performance.now(); drawTree(); return performance.now() - begun })()"
    times = [page.page.evaluate(draw) for _ in range(60)]
    assert sorted(times)[30] < 8


def test_rows_stay_while_one_is_pointed_at_or_focused(visit):
    visited = visit(seconds=0.1)
    visited.fake.world.busy = 5.0
    for _ in range(20):
        visited.fake.world.step()
    page = visited.open().page
    shown = "[...document.querySelectorAll('#recent tbody tr')].map((row) => row.row.id).join()"
    page.locator("#recent-more").focus()
    page.keyboard.press("Shift+Tab")
    for point in (lambda: None, page.locator("#recent tbody tr").first.hover):
        point()
        visited.until("$('recent-title').textContent.includes('held')")
        before, time_before = page.evaluate(shown), page.evaluate("page.state.time")
        page.wait_for_timeout(500)
        assert page.evaluate("page.state.time") > time_before and page.evaluate(shown) == before
        page.evaluate("document.activeElement.blur()")
    page.mouse.move(0, 0)
    page.wait_for_timeout(500)
    assert page.evaluate(shown) != before


def test_a_chosen_scheme_stays(visit):
    page = visit(color_scheme="light").open().page
    page.locator("#theme").click()
    page.reload()
    page.wait_for_selector("body.on")
    assert page.evaluate("isDark() && getComputedStyle(document.body).colorScheme") == "dark"


RGB = "(name) => colour(name).match(/[\\d.]+/g).slice(0, 3).map(Number)"


def luminance(rgb: list[float]) -> float:
    """Relative luminance as WCAG has it; parts from 0 to 255."""
    parts = [part / 255 / 12.92 if part / 255 <= 0.04045 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in rgb]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_the_contrast_of_wcag_aa(visit, scheme):
    page = visit(color_scheme=scheme).open().page
    texts, grounds = ("ink", "soft", "accent", "good", "warn", "bad"), ("ground", "surface", "raised")
    light = {name: luminance(page.evaluate(RGB, name)) for name in (*texts, *grounds, "mark")}
    for text, ground in [*((text, ground) for text in texts for ground in grounds), ("ink", "mark")]:
        low, high = sorted((light[text], light[ground]))
        assert (high + 0.05) / (low + 0.05) >= 4.5, f"{text} on {ground}"
