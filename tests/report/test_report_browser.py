"""The report in a real browser, as a reader uses it: by mouse and keyboard, on a phone, in the dark, offline."""

import json
import os

import pytest
from report.report_cases import HOSTILE

if os.environ.get("CI") != "true":
    pytest.importorskip("selenium", reason="Selenium is among the dev extras")

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait


@pytest.fixture
def opened(chromium, page):
    """The page, freshly opened at desk width in light; what it logs and asks for is looked at when the test ends."""
    size(chromium, 1280)
    theme(chromium, "light")
    for kind in ("browser", "performance"):
        chromium.get_log(kind)
    chromium.get(page.as_uri())
    WebDriverWait(chromium, 20).until(lambda browser: browser.find_elements(By.CSS_SELECTOR, "#sample h3"))
    yield chromium
    assert chromium.get_log("browser") == []
    assert requests(chromium) == {page.as_uri()}
    assert chromium.title == "evictbench report"


def requests(browser):
    """Addresses asked for by anything but the browser's own pages."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"}
    return {url.partition("#")[0] for url in asked if not url.startswith(("chrome:", "data:"))}


def size(browser, width):
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def theme(browser, name):
    features = [{"name": "prefers-color-scheme", "value": name}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def rows(browser):
    return [row for row in browser.find_elements(By.CSS_SELECTOR, "#board tbody tr") if row.is_displayed()]


def column(browser, heading):
    heads = browser.execute_script("return [...document.querySelectorAll('#board thead th')].map(h => h.textContent)")
    at = heads.index(heading)
    return [
        browser.execute_script("return arguments[0].cells[arguments[1]].textContent", row, at) for row in rows(browser)
    ]


def head(browser, heading):
    return browser.find_element(By.XPATH, f"//table[@id='board']//th[button[text()='{heading}']]")


def choose(browser, form, name, words):
    Select(browser.find_element(By.CSS_SELECTOR, f"#{form} select[name={name}]")).select_by_visible_text(words)


def test_sorting_by_click_and_by_key(opened):
    score = head(opened, "score")
    assert score.get_attribute("aria-sort") is None
    score.find_element(By.TAG_NAME, "button").click()
    values = [float(text) for text in column(opened, "score")]
    assert values == sorted(values, reverse=True)
    assert values[0] == 100.0
    assert score.get_attribute("aria-sort") == "descending"
    score.find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)
    assert [float(text) for text in column(opened, "score")] == sorted(values)
    assert score.get_attribute("aria-sort") == "ascending"
    head(opened, "policy").find_element(By.TAG_NAME, "button").send_keys(Keys.SPACE)
    assert column(opened, "policy") == sorted(column(opened, "policy"))
    assert len(opened.find_elements(By.CSS_SELECTOR, "[aria-sort]")) == 1


def test_budgets_sort_by_size_and_missing_values_come_last(opened):
    for _ in range(2):
        head(opened, "budget").find_element(By.TAG_NAME, "button").click()
    assert column(opened, "budget") == ["64", "64", "128", "128", "25%", "none"]
    head(opened, "vs full").find_element(By.TAG_NAME, "button").click()
    versus = column(opened, "vs full")
    assert versus[0] == "+65.0"
    assert versus[-2:] == ["", ""]


def test_filters_by_suite_budget_model_task_and_policy(opened):
    assert len(rows(opened)) == 6
    choose(opened, "filters", "budget", "64")
    assert column(opened, "policy") == ["h2o", "tova"]
    assert opened.find_element(By.ID, "count").text == "2 of 16 rows"
    choose(opened, "filters", "budget", "all")
    choose(opened, "filters", "suite", "fidelity")
    assert column(opened, "budget") == ["25%"]
    assert head(opened, "kl").is_displayed()
    assert not head(opened, "vs full").is_displayed()  # there is no full cache to compare with
    choose(opened, "filters", "suite", "ruler")
    choose(opened, "filters", "task", "vt")
    assert set(column(opened, "task")) == {"vt"}
    assert len(rows(opened)) == 5
    assert not head(opened, "kl").is_displayed()
    opened.find_element(By.NAME, "policy").send_keys("TOV")
    assert column(opened, "policy") == ["tova", "tova"]
    choose(opened, "filters", "task", "whole run")
    assert set(column(opened, "task")) == {"mean of 2"}


def test_a_sample_under_two_policies(opened):
    choose(opened, "browse", "pack", "ruler, tiny, niah (10)")
    WebDriverWait(opened, 10).until(lambda browser: "hay" in browser.find_element(By.ID, "sample").text)
    choose(opened, "browse", "left", "full")
    choose(opened, "browse", "right", "tova 128")
    choose(opened, "browse", "show", "where scores differ")
    samples = Select(opened.find_element(By.NAME, "sample"))
    assert [option.text for option in samples.options] == [f"{doc_id}: 0 | 100" for doc_id in range(5, 10)]
    samples.select_by_visible_text("7: 0 | 100")
    sides = opened.find_elements(By.CSS_SELECTOR, ".sides > div")
    assert [side.find_element(By.TAG_NAME, "h4").text for side in sides] == ["full", "tova 128"]
    assert sides[0].find_element(By.TAG_NAME, "pre").text == "it is 7"
    assert sides[1].find_element(By.TAG_NAME, "pre").text == HOSTILE
    assert "cut off" in sides[1].text
    assert "at most 200" in sides[1].text
    context, question = opened.find_elements(By.CSS_SELECTOR, "#sample > pre")
    assert context.text.startswith("the needle is seven </script>")
    assert context.text.endswith("hay")
    assert question.text == "what ?"
    choose(opened, "browse", "show", "where the right one is worse")
    assert opened.find_element(By.ID, "sample").text == "No sample is like that."


def test_stepping_through_samples_by_keyboard(opened):
    choose(opened, "browse", "pack", "ruler, tiny, vt (10)")
    WebDriverWait(opened, 10).until(lambda browser: browser.find_element(By.NAME, "sample").text)
    previous, following = opened.find_element(By.ID, "previous"), opened.find_element(By.ID, "next")
    assert not previous.is_enabled()
    following.send_keys(Keys.ENTER)
    assert opened.find_element(By.CSS_SELECTOR, "#sample h3").text == "Sample 1"
    assert opened.find_element(By.ID, "said").text == "Sample 2 of 10"
    previous.send_keys(Keys.SPACE)
    assert opened.find_element(By.CSS_SELECTOR, "#sample h3").text == "Sample 0"


def test_the_focus_can_be_seen_and_goes_everywhere(opened):
    body = opened.find_element(By.TAG_NAME, "body")
    seen = set()
    for _ in range(150):
        body = opened.switch_to.active_element
        body.send_keys(Keys.TAB)
        active = opened.switch_to.active_element
        if active.tag_name == "body":
            break
        outline = opened.execute_script("return getComputedStyle(arguments[0]).outlineStyle", active)
        assert outline != "none", active.get_attribute("outerHTML")[:100]
        seen.add(active.get_attribute("name") or active.get_attribute("id") or active.text or active.tag_name)
    assert {"suite", "budget", "model", "task", "policy", "score", "pack", "left", "right", "sample", "next"} <= seen


@pytest.mark.parametrize("width", [320, 375])
def test_a_phone_scrolls_in_one_direction(opened, width):
    size(opened, width)
    assert opened.execute_script("return document.documentElement.scrollWidth") == width
    assert len(rows(opened)) == 6
    assert head(opened, "score").is_displayed()
    assert not head(opened, "seen, mean").is_displayed()
    for details in opened.find_elements(By.TAG_NAME, "details"):
        opened.execute_script("arguments[0].open = true", details)
    assert opened.execute_script("return document.documentElement.scrollWidth") == width
    opened.find_element(By.NAME, "all").click()
    assert head(opened, "seen, mean").is_displayed()
    assert opened.execute_script("return document.documentElement.scrollWidth") == width


CONTRAST = """
const shade = (text) => text.match(/[\\d.]+/g).slice(0, 3).map(Number).map((v) => v / 255)
  .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
const light = (text) => shade(text).reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const page = light(getComputedStyle(document.body).backgroundColor);
return arguments[0].map((selector) => {
  const text = light(getComputedStyle(document.querySelector(selector)).color);
  return (Math.max(page, text) + 0.05) / (Math.min(page, text) + 0.05);
});
"""


@pytest.mark.parametrize("name", ["light", "dark"])
def test_words_stand_out_in_light_and_dark(opened, name):
    theme(opened, name)
    red = opened.execute_script("return getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]")
    assert (int(red) > 128) == (name == "light")
    ratios = opened.execute_script(CONTRAST, ["h1", "td", "#count", "#board a", ".filters label", ".score"])
    assert min(ratios) >= 4.5
    turned = opened.execute_script("return getComputedStyle(document.querySelector('.plot svg')).filter")
    assert ("invert" in turned) == (name == "dark")


def test_plots_are_words_that_can_be_selected(opened):
    text = opened.execute_script(
        "const range = document.createRange(); range.selectNodeContents(document.querySelector('.plot svg'));"
        "getSelection().removeAllRanges(); getSelection().addRange(range); return getSelection().toString()"
    )
    assert "h2o" in text
    assert "score (%)" in text


def test_a_run_is_found_from_its_row(opened):
    link = rows(opened)[0].find_element(By.TAG_NAME, "a")
    target = link.get_attribute("href").partition("#")[2]
    link.click()
    assert opened.find_element(By.ID, target).tag_name == "tr"
    box = opened.find_element(By.ID, target).rect
    top = opened.execute_script("return scrollY")
    assert top <= box["y"] <= top + 800
