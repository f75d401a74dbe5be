"""Reports of small made-up results, and a real browser to open them in."""

import json
import os
import shutil

import pytest
from plot.plot_records import retention, sample, steps, write_run, write_trace
from report.report_cases import HOSTILE, WORDS, answers, word_tokenizer

from evictbench.cli import app
from evictbench.store import run_folder


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Two tasks, the full cache, two policies at two budgets; one of them is odd in four ways."""
    root = tmp_path_factory.mktemp("report") / "runs"
    tasks = ("niah", "vt")

    def cell(policy, budget, counts, occupancy, **changes):
        lines = [line for task, count in zip(tasks, counts, strict=True) for line in answers(count, task=task)]
        lines = [line | {"occupancy_max": occupancy, "occupancy_mean": float(occupancy)} | changes for line in lines]
        path = write_run(root, lines, policy=policy, budget=budget, tasks=tasks, settings={"group": "mean"})
        session = {"commit": "a" * 40, "torch": "2.13.0", "started": "2026-01-02T00:00:00+00:00", "batch_size": 8}
        return path, session

    made = [cell("full", None, (5, 2), 12), cell("h2o", "64", (4, 2), 12), cell("h2o", "128", (5, 2), 12)]
    made += [cell("tova", "64", (1, 0), 12), cell("tova", "128", (10, 10), 200, truncated=True, text=HOSTILE)]
    for number, (path, session) in enumerate(made):
        run = json.loads((path / run_folder.RUN).read_text())
        run["sessions"] = [session | ({"commit": "b" * 40 + "+changes"} if number == 4 else {})]
        (path / run_folder.RUN).write_text(json.dumps(run))
    lines = [sample(doc_id, 0.25, metrics={"score": 0.25, "kl": 0.5}, task="gsm8k", text="") for doc_id in range(3)]
    write_run(root, lines, policy="h2o", budget="25%", tasks=("gsm8k",), suite="fidelity")
    return root


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return word_tokenizer(tmp_path_factory.mktemp("tokenizer"), WORDS)


@pytest.fixture(scope="session")
def trace(tmp_path_factory):
    return write_trace(tmp_path_factory.mktemp("traces") / "light", steps(), retention())


@pytest.fixture
def report(capsys):
    def call(*words):
        with pytest.raises(SystemExit) as ended:
            app.main(["report", *map(str, words)])
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return call


@pytest.fixture(scope="session")
def page(runs, tokenizer, trace, tmp_path_factory):
    """The report of `runs` and `trace`, written once."""
    out = tmp_path_factory.mktemp("page") / "report.html"
    with pytest.raises(SystemExit) as ended:
        app.main(["report", str(runs), "--trace", str(trace), "--out", str(out), "--tokenizer", str(tokenizer)])
    assert ended.value.code == 0
    return out


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    """A headless Chromium, driven by Selenium. Where there is none the test is skipped, with CI=true it fails."""
    binary = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        missing = "no Chromium with its driver is installed here (Debian: chromium, chromium-driver)"
        if os.environ.get("CI") == "true":
            pytest.fail(f"{missing}, and with CI=true it has to be")
        pytest.skip(missing)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for word in ("headless", "no-sandbox", "disable-gpu", "disable-background-networking", "no-first-run"):
        options.add_argument(f"--{word}")
    options.add_argument("--disable-dev-shm-usage")
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('chromium')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(driver))
    yield browser
    browser.quit()
