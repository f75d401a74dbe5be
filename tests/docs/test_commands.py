"""Every command line in the README and in docs/ is given, as it stands but for sizes.

- `run`, `train` and small traces run on a tiny model, one sample each; with a hub model they go as far as the sentence
  that says that this model is not here; with a learned policy's bundled weights they run on the bundled model.
- `sweep` is planned (`--dry-run`); the sweep of "Add a policy" runs (test_python_blocks.py).
- `plot`, `report` and `gate` look at results that were made before.
- Traces of shapes, and what is not evictbench: options, targets, modules and names are looked up.
"""

import importlib.util
import re
import shutil

import pytest
from pages import PAGES, ROOT, blocks, commands
from typer.main import get_command

from evictbench.errors import UserError

LEARNED = ("kvpop", "dms", "indexmem_pp", "distillcache")
NOT_HERE = re.compile(r"^[A-Za-z]+/\w+-[\w.-]+$|^cuda:\d|^kvpop-")
"""Hub models, GPUs, weights that are trained for hours."""

EVERY = [command for page in PAGES for command in commands(page)]


def options_of(words):
    """The parameters of a command by option, and the command's name."""
    from evictbench.cli.app import app

    command, rest = get_command(app), list(words)
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest.pop(0)]
    return {name: parameter for parameter in command.params for name in parameter.opts}, rest


def check_options(words):
    """Every option exists."""
    known, rest = options_of(words)
    for word in rest:
        if word.startswith("--"):
            assert word in known, f"{word} is no option of evictbench {words[0]}"


def value_of(words, option, default=None):
    return words[words.index(option) + 1] if option in words else default


def with_value(words, option, value):
    words = list(words)
    if option in words:
        words[words.index(option) + 1] = value
        return words
    return [*words, option, value]


@pytest.fixture
def main(capsys):
    """The command in this process: exit code, stdout, stderr."""

    def main(words):
        from evictbench.cli.app import main

        with pytest.raises(SystemExit) as ended:
            main(list(words))
        output = capsys.readouterr()
        return ended.value.code or 0, output.out, output.err

    return main


@pytest.mark.parametrize("command", EVERY, ids=str)
def test_command(command, request, desk, tiny, main):
    name, *words = command.words
    if name == "evictbench":
        for variable in command.environment:
            assert variable.startswith("RAY_ADDRESS="), variable
        Evictbench(request, desk, tiny, main, command).check(words)
    elif name == "evictbench-lm-eval":
        assert value_of(words, "--model") == "evictbench"
        assert re.fullmatch(r"pretrained=smollm2,policy=[\w:=;]+,budget=\d+", value_of(words, "--model_args"))
    elif name == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert words[0] in targets
    elif name in ("accelerate", "torchrun"):
        start = words.index("-m")
        assert words[start + 1] == "evictbench"
        check_options(words[start + 2 :])
    elif name == "python":
        assert words[0] == "-m"
        assert importlib.util.find_spec(words[1])
    elif name == "pip":
        package = words[-1]
        extra = re.fullmatch(r"evictbench\[(\w+)\]", package)
        assert words[0] == "install"
        assert package == "rooms" or (extra and f"\n{extra[1]} = [" in (ROOT / "pyproject.toml").read_text())
    elif name == "cp":
        assert words == ["-r", "results/runs", "results/main"]
    else:
        assert (name, *words) == ("ray", "start", "--head"), f"nobody checks this line: {command}"


class Evictbench:
    """One `evictbench` command of a page."""

    def __init__(self, request, desk, tiny, main, command):
        self.request, self.desk, self.tiny, self.main, self.command = request, desk, str(tiny), main, command

    def check(self, words):
        complete = words[-1] != "..."
        words = words if complete else words[:-1]
        check_options(words)
        if complete:
            getattr(self, words[0].replace("-", "_"), self.plain)(words)

    def plain(self, words):
        code, out, error = self.main(words)
        assert code == 0, error
        assert out

    def run(self, words):
        if value_of(words, "--suite") == "rooms":  # is made and run in test_python_blocks.py
            return
        policy = value_of(words, "--policy").partition(":")[0]
        weights = value_of(words, "--weights")
        if "--model" not in words and ((policy not in LEARNED and not policy.startswith("kvpop")) or weights):
            words = with_value(words, "--model", self.tiny)
        if value_of(words, "--suite") == "fidelity":
            words = with_value(words, "--context", "400")
        else:
            words = with_value(words, "--max-new-tokens", "2")
        self.ends_well(with_value(words, "--limit", "1"), weights)

    def sweep(self, words):
        if "sweep.yaml" in words:
            (text,) = (b.text for b in blocks(self.command.page, "yaml") if b.text.startswith("policies:"))
            (self.desk / "sweep.yaml").write_text(text)
            words = with_value(with_value(words, "--limit", "1"), "--data-dir", "DATA")
        elif "--model" not in words:
            words = with_value(words, "--model", self.tiny)
        words = words if "--dry-run" in words else [*words, "--dry-run"]
        self.ends_well(words, "kvpop-mine" if "sweep.yaml" in words else None)

    def train(self, words):
        if "--model" not in words:
            words = with_value(words, "--model", self.tiny)
        small = int(value_of(words, "--steps", "1000")) <= 50
        if small or NOT_HERE.match(value_of(words, "--model")):
            self.ends_well(words)
        else:
            self.ends_well(with_value(with_value(words, "--steps", "2"), "--length", "300"))

    def trace(self, words):
        words = list(words)
        if value_of(words, "--model", "").startswith("shape:") or any(name in " ".join(words) for name in LEARNED):
            from evictbench.cli.app import app
            from evictbench.trace.settings import TraceSettings, check

            context = get_command(app).commands["trace"].make_context("trace", words[1:])
            given = {k: v for k, v in context.params.items() if k in TraceSettings.__dataclass_fields__}
            check(TraceSettings(**given))
            return
        words = with_value(words, "--new-tokens", "4")
        self.ends_well(with_value(with_value(words, "--model", self.tiny), "--contexts", "288"))

    def plot(self, words):
        self.of_results(words)

    def report(self, words):
        self.of_results(words)

    def gate(self, words):
        shutil.copytree(self.request.getfixturevalue("results") / "results", self.desk / "results")
        code, out, error = self.main(words)
        # Three samples of a tiny model decide nothing, and a random one reproduces no paper.
        few = code == 2 and re.search(r"too few|documents|published|no run|holds no", error)
        assert code in (0, 1) or few, error
        assert out or few

    def of_results(self, words):
        shutil.copytree(self.request.getfixturevalue("results") / "results", self.desk / "results")
        if "results/keydiff" in words:
            shutil.copytree(self.desk / "results/runs", self.desk / "results/keydiff")
        code, out, error = self.main(words)
        assert code == 0, error
        assert out

    def ends_well(self, words, absent=None):
        """It ends with 0; or with 2 and a sentence that names what cannot be here."""
        code, out, error = self.main(words)
        written = value_of(words, "--out")
        missing = [word for word in words if NOT_HERE.match(word) and word != written]
        missing += [absent] if absent else []
        if missing:
            assert code == 2, (out, error)
            assert any(name in error for name in missing) or "GPU" in error, error
        else:
            assert code == 0, (out[-2000:], error[-2000:])


def spoken():
    """Commands inside sentences, `evictbench run --limit 5`, with their page."""
    for page in PAGES:
        prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for words in re.findall(r"`evictbench ([a-z]+(?: [^`]+)?)`", prose):
            yield f"{page.name}: {words}", words.split()


@pytest.mark.parametrize(("name", "words"), [pytest.param(*pair, id=pair[0]) for pair in spoken()])
def test_commands_in_sentences_have_these_options(name, words):
    from evictbench.cli.app import app

    assert words[0] in get_command(app).commands
    check_options(words)


@pytest.mark.parametrize(
    "line",
    [
        "evictbench run --polcy h2o --budget 256 --suite ruler",
        "evictbench run --policy h3o --budget 256 --suite ruler --tasks niah_single_1",
        "evictbench run --policy h2o --budget 256 --suite ruler --tasks nih_single_1",
        "evictbench sweep --policies h2o:gruop=max --budgets 64 --suites ruler --context 512",
        "evictbench list polices",
        "evictbench trace --policies h2o,kvpop --contexts 2048 --model shape:qwen3-8b",
        "evictbench run --policy h2o --budget 256 --suite rulr --model Qwen/Qwen3-8B",
        "python -m benchmarks.nothing",
        "make nothing",
        "curl somewhere",
    ],
)
def test_wrong_lines_are_found(line, request, desk, tiny, capsys):
    """What these checks are worth: each of these would stand in no page for long."""
    from pages import Command

    request_main = request.getfixturevalue("main")
    wrong = Command(ROOT / "README.md", 1, (), tuple(line.split()))
    with pytest.raises((AssertionError, UserError)):
        test_command(wrong, request, desk, tiny, request_main)
