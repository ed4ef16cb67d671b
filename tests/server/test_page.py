"""The page at /, in a headless browser. `make test-browser` runs it where Chromium is installed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.server.serving import WAIT, Live


def test_the_page_needs_nothing_from_elsewhere(server: Live) -> None:
    answer = server.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "src=" not in answer.text
    assert "://" not in answer.text.replace("http://www.w3.org/2000/svg", "")


def until(page, condition: str, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Wait. Playwright's own way needs `eval`, which the page's policy forbids."""
    deadline = time.monotonic() + WAIT
    while not page.evaluate(f"() => {condition}"):
        meanwhile()
        assert time.monotonic() < deadline, f"not so: {condition}; {page.problems}"
        page.wait_for_timeout(20)


@pytest.fixture
def page(demo_live: Live) -> Iterator:
    from playwright.sync_api import sync_playwright

    browser_path = shutil.which("chromium")
    assert browser_path, "there is no chromium; install Debian's package"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=browser_path, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        page = browser.new_page(viewport={"width": 1100, "height": 800})
        page.problems = []
        page.on("pageerror", lambda error: page.problems.append(str(error)))
        page.on("console", lambda line: page.problems.append(line.text) if line.type == "error" else None)
        page.goto(demo_live.url)
        yield page
        browser.close()


@pytest.mark.browser
def test_a_chat_on_the_page_and_its_plots(page, demo_live: Live, tmp_path: Path) -> None:
    until(page, "document.querySelector('#model').textContent.includes('demo-moe')")
    page.fill("input[name=text]", "Tell me a story.")
    page.fill("input[name=tokens]", "300")
    with demo_live.few_steps(20) as steps:  # The page looks once a second, and shows what was new then.
        page.press("input[name=text]", "Enter")
        until(page, "document.querySelector('#batch .now').textContent.startsWith('1 ')")
        until(page, "/^\\d/.test(document.querySelector('#itl .now').textContent)", lambda: steps.more(1))
    until(page, "document.querySelector('#figures').textContent.includes('from the cache')")
    answer = page.locator("#talk div").nth(1).locator("span").text_content()
    assert len(answer) > 20
    until(page, "/^[1-9]/.test(document.querySelector('#bits .now').textContent)")
    for plot in ("itl", "batch", "cache", "bits"):
        assert page.locator(f"#{plot} path.line.a").get_attribute("d").startswith("M")
    page.fill("input[name=text]", "Go on.")
    page.fill("input[name=tokens]", "10")
    page.press("input[name=text]", "Enter")
    until(page, "/^10 tokens.*[1-9]\\d* from the cache/.test(document.querySelector('#figures').textContent)")
    page.screenshot(path=tmp_path / "page.png", full_page=True)
    assert (tmp_path / "page.png").stat().st_size > 10_000
    assert page.problems == []
    assert page.locator("#talk b").all_text_contents() == ["you", "model"] * 2


@pytest.mark.browser
def test_the_stop_button_ends_the_answer(page, demo_live: Live) -> None:
    page.fill("input[name=text]", "Tell me a very long story.")
    page.fill("input[name=tokens]", "700")
    with demo_live.few_steps(100):
        page.press("input[name=text]", "Enter")
        until(page, "document.querySelectorAll('#talk div').length == 2")
        until(page, "document.querySelectorAll('#talk span')[1].textContent.length > 5")
        page.click("#stop")
        until(page, "!document.querySelector('#send').disabled")
        demo_live.assert_idle()
    assert page.problems == []
