"""The report in Chromium: it opens from disk without errors, charts have marks, the timeline zooms."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_report_page import write_pages

pytestmark = pytest.mark.browser

MARKS = ".points path, .js-line, .js-fill, .hm image, .heatmaplayer image"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(word)
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_pages(tmp_path_factory.mktemp("reports"))


def wait(browser: Any, until: Callable[[], bool]) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    WebDriverWait(browser, 60).until(lambda _: until())


def show(browser: Any, page: Path, *, width: int = 1280) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    feature = {"name": "prefers-color-scheme", "value": "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.get(page.as_uri())
    browser.execute_script("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    drawn = "return document.querySelectorAll('.chart:not(.js-plotly-plot)').length == 0"
    wait(browser, lambda: browser.execute_script(drawn))


LEGENDS = """
return [...document.querySelectorAll('.chart')].filter((chart) => {
  const entries = [...chart.querySelectorAll('.legend .traces')].map((entry) => entry.textContent.trim());
  const names = [...new Set((chart.data || []).map((trace) => trace.name))];
  return names.length > 1 && names.some((name) => !entries.includes(name));
}).map((chart) => chart.id);
"""
"""Charts with marks of several names of which one stands in no legend."""


@pytest.mark.parametrize("width", [1280, 1920])
@pytest.mark.parametrize("kind", ["run", "offline", "comparison", "bench"])
def test_a_page_opens_without_errors_and_every_chart_has_marks(
    browser: Any, pages: dict[str, Path], kind: str, width: int
) -> None:
    """Nothing is fetched, nothing overflows, no text of a model ran as a script.

    Seen failing with an undefined name in `page.js`, a chart without data, a figure of fixed width, and a prompt
    that was set as markup; and with bars of several names without a legend.
    """
    show(browser, pages[kind], width=width)
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    counts = browser.execute_script(
        "return [...document.querySelectorAll('.chart')]"
        ".map(chart => [chart.id, chart.querySelectorAll(arguments[0]).length])",
        MARKS,
    )
    assert counts
    assert [name for name, marks in counts if not marks] == []
    assert browser.execute_script(LEGENDS) == []
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    assert browser.execute_script("return window.hacked") is None


def test_one_switch_shows_steps_as_samples_tokens_or_hours(browser: Any, pages: dict[str, Path]) -> None:
    """128 samples a step, from 0; row k is at 10 + k seconds. Charts over steps follow, others stay.

    Seen failing with totals that begin at step 1: every point moved by a step.
    """
    script = (
        "const axis = document.getElementById('axis'); axis.value = arguments[0];"
        "axis.dispatchEvent(new Event('change'));"
        "return [...document.querySelectorAll('.chart')].filter((place) => place.layout.xaxis?.title?.text === "
        "arguments[1]).map((place) => [place.data[0].x[0], place.data[0].x.at(-1)])"
    )
    show(browser, pages["run"])
    steps = browser.execute_script(script, "steps", "trainer step")
    samples = browser.execute_script(script, "samples", "samples trained")
    assert samples == [[128 * first, 128 * last] for first, last in steps]
    assert [0, 40] in steps
    hours = browser.execute_script(script, "hours", "hours since the start, start-up included")
    assert hours[0] == pytest.approx([11 / 3600, 50 / 3600])
    assert len(hours) == len(steps) > 10


def test_the_timeline_zooms_by_mouse_and_by_button(browser: Any, pages: dict[str, Path]) -> None:
    """Seen failing with a range that was not taken over: the picture was stretched instead of redrawn."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By

    def extent() -> float:
        return float(browser.execute_script("return visible[1] - visible[0]"))

    show(browser, pages["run"])
    before = extent()
    chart = browser.find_element(By.ID, "timeline-chart")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", chart)
    field = chart.find_element(By.CSS_SELECTOR, ".nsewdrag")
    ActionChains(browser).move_to_element_with_offset(field, -100, 0).click_and_hold().move_by_offset(
        200, 5
    ).release().perform()
    wait(browser, lambda: extent() < before / 2)
    zoomed = extent()
    drawn = browser.execute_script(
        "const x = document.getElementById('timeline-chart').data[0].x; return x[x.length - 1] - x[0]"
    )
    assert drawn == pytest.approx(zoomed * 1e-4, rel=0.01)
    browser.find_element(By.CSS_SELECTOR, "[data-do=all]").click()
    assert extent() > before


def test_samples_can_be_chosen_and_show_their_versions(browser: Any, pages: dict[str, Path]) -> None:
    """The second sample is two characters of version k - 1 and four of version k. Seen failing with one colour.

    The last step comes first; buttons move by step and by group. Seen failing with the first step shown first.
    """
    from selenium.webdriver.common.by import By

    def click(what: str) -> str:
        browser.find_element(By.CSS_SELECTOR, f"[data-do={what}]").click()
        return str(browser.execute_script(where))

    show(browser, pages["run"])
    where = "return document.getElementById('sample-where').textContent"
    assert browser.execute_script(where) == "step 40 of 40, group 1 of 2: sums/0/40#0"
    assert click("group-on") == "step 40 of 40, group 2 of 2: sums/1/40#0"
    assert click("step-back") == "step 39 of 40, group 2 of 2: sums/1/39#0"
    browser.execute_script(
        "const filter = document.getElementById('sample-filter');"
        "filter.value = 'branches'; filter.dispatchEvent(new Event('change'))"
    )
    assert browser.execute_script(where) == "step 39 of 40, group 1 of 1: sums/1/39#0"
    heads = browser.execute_script(
        "return [...document.querySelectorAll('.answer header')]"
        ".map(head => [...head.children].map(part => part.textContent))"
    )
    assert heads[1:3] == [
        ["branch 1", "9 tokens", "cut off at the token limit", "version 38 (age 0)"],
        ["reward 0.00", "6 tokens", "cut off at the token limit", "version 37 (age 1)", "version 38 (age 0)"],
    ]
    texts = browser.execute_script(
        "return [...document.querySelectorAll('.answer')[1].querySelectorAll('.text span')]"
        ".map(part => [part.textContent, part.title])"
    )
    assert texts == [["ab", "version 37"], ["cdef", "version 38"]]
    given = browser.execute_script("return document.querySelectorAll('.answer .turn.given').length")
    assert given == 1
