"""The report in a browser: no requests, no errors, no overflow at two screen widths."""

import pytest
from browser import find_browser, open_browser

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(find_browser() is None, reason="no Chromium here (Debian: chromium)"),
]

OVERFLOWING = """
(() => {
  const wide = [...document.querySelectorAll('body *')].filter(element => {
    const scroller = element.closest('.scroll');
    const inside = scroller && scroller !== element;
    return !inside && element.getBoundingClientRect().right > innerWidth + 0.5;
  });
  const names = wide.map(element => element.outerHTML.slice(0, 90));
  return [document.documentElement.scrollWidth > innerWidth, names];
})()
"""
PICTURES = "[...document.images].map(image => image.naturalWidth)"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with open_browser(find_browser(), tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(page_of_two, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page_of_two)
    return path


def test_page_loads_without_requests_or_errors(browser, page):
    browser.open(page.as_uri())

    asked = {event["request"]["url"] for event in browser.events_of("Network.requestWillBeSent")}
    assert {url for url in asked if not url.startswith("data:")} == {page.as_uri()}
    assert browser.events_of("Log.entryAdded") == []
    assert browser.events_of("Runtime.consoleAPICalled") == []
    assert browser.events_of("Runtime.exceptionThrown") == []
    widths = browser.evaluate(PICTURES)
    assert widths == [60] * 4, "two runs, each with a sample grid and a figure"
    assert browser.evaluate("document.querySelectorAll('svg').length") >= 5
    # Run names are escaped.
    assert browser.evaluate("document.querySelectorAll('b').length") == 0
    assert "<b>second</b>" in browser.evaluate("document.body.innerText")


@pytest.mark.parametrize("width", [1280, 390])
def test_page_does_not_overflow(browser, page, width):
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.call("Emulation.setDeviceMetricsOverride", **size)
    browser.open(page.as_uri())
    browser.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert browser.evaluate("innerWidth") == width
    assert browser.evaluate(OVERFLOWING) == [False, []]


def test_page_follows_the_color_scheme(browser, page):
    seen = {}
    for scheme in ("light", "dark"):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        browser.call("Emulation.setEmulatedMedia", features=[feature])
        browser.open(page.as_uri())
        seen[scheme] = browser.evaluate(BACKGROUND)
    assert seen == {"light": "rgb(255, 255, 255)", "dark": "rgb(21, 23, 27)"}
