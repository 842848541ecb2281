"""The page in a browser: it streams, stops, sends no other requests and logs no errors."""

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install playwright"
)


class Visit:
    """A page with its console messages and requests."""

    def __init__(self, browser: "playwright.Browser", url: str, **settings: object) -> None:
        self.page = browser.new_page(**settings)
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda said: self.complaints.append(f"{said.type}: {said.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda one: self.asked.append(one.url))
        self.page.goto(url)

    def status(self, text: str) -> None:
        """Waits until the status line starts with a text."""
        self.shows("#status", re.compile("^" + re.escape(text)))

    def shows(self, selector: str, text: "str | re.Pattern[str]") -> None:
        """Waits until an element contains a text."""
        playwright.expect(self.page.locator(selector)).to_contain_text(text, timeout=30_000)

    def grown(self) -> str:
        return self.page.text_content("#grown") or ""


@pytest.fixture
def visit(browser: "playwright.Browser", server) -> Iterator[Visit]:
    visit = Visit(browser, server.url)
    yield visit
    assert visit.complaints == []
    hosts = {urlsplit(url).netloc for url in visit.asked if not url.startswith("data:")}
    assert hosts == {f"127.0.0.1:{server.port}"}
    visit.page.close()


def test_a_generation_streams_and_ends(visit: Visit, server, tmp_path: Path) -> None:
    page = visit.page
    visit.shows("#model", "4096 positions")
    page.fill("#prompt", "Call me <b>Ishmael</b>.")
    page.fill("#tokens_to_generate", "1500")
    page.fill("#random_seed", "4")
    page.click("#generate")
    lengths = []
    while page.is_disabled("#generate"):
        lengths.append(len(visit.grown()))
        page.wait_for_timeout(30)
    visit.status("done in")
    assert len(set(lengths)) > 3, "the text was not streamed"
    assert page.text_content("#given") == "Call me <b>Ishmael</b>."
    assert page.locator("#output b").count() == 0
    fields = {"tokens_to_generate": 1500, "temperature": 0.8, "random_seed": 4}
    _, answer = server.ask("PUT", "/api", prompts=["Call me <b>Ishmael</b>."], **fields)
    assert page.text_content("#output") == answer["text"][0]
    page.screenshot(path=tmp_path / "done.png")
    assert (tmp_path / "done.png").stat().st_size > 10_000


def test_a_generation_stops(visit: Visit, server) -> None:
    page = visit.page
    page.fill("#tokens_to_generate", "4000")
    page.press("#prompt", "Control+Enter")
    visit.shows("#grown", re.compile(".{20}", re.DOTALL))
    page.click("#stop")
    visit.status("stopped")
    length = len(visit.grown())
    assert 20 <= length < 3900
    page.wait_for_timeout(300)
    assert len(visit.grown()) == length
    page.fill("#tokens_to_generate", "3")  # the next request need not wait for the rest
    page.click("#generate")
    visit.status("done in")


def test_a_refusal_is_shown_in_one_line(visit: Visit) -> None:
    page = visit.page
    page.fill("#top_k", "5")
    page.fill("#top_p", "0.5")
    page.click("#generate")
    visit.status("top_k and top_p exclude each other")
    assert "wrong" in page.get_attribute("#status", "class")
    # A browser logs every 4xx answer on its console.
    assert [one for one in visit.complaints if "400" not in one] == []
    visit.complaints.clear()


def test_a_guarded_server_asks_for_its_token(
    browser: "playwright.Browser", start, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("a token of no importance".replace(" ", "-"))
    server = start("--token-file", str(tmp_path / "token"))
    visit = Visit(browser, server.url, color_scheme="dark", viewport={"width": 400, "height": 800})
    visit.status("this server needs an access token")
    visit.page.fill("#token", "a-token-of-no-importance")
    visit.page.press("#token", "Tab")
    visit.shows("#model", "4096 positions")
    visit.page.fill("#tokens_to_generate", "3")
    visit.page.click("#generate")
    visit.status("done in")
    assert [one for one in visit.complaints if "401" not in one] == []
    visit.page.close()
