"""Policies and suites by name, their settings, and policies from a file."""

import pytest
from fake_plugin_fixtures import environment, installed
from fake_plugins import TOY, Hoard

from evictbench import registry
from evictbench.errors import UserError

__all__ = ["environment", "installed"]


def test_names_are_found_without_loading_anything():
    assert {"full", "h2o", "hoard", "broken"} <= set(registry.names(registry.POLICIES))
    assert {"ruler", "toy"} <= set(registry.names(registry.SUITES))


def test_a_policy_from_another_package_is_as_good_as_ours():
    assert registry.load_policy("hoard") is Hoard
    assert registry.load_suite("toy") is TOY


def test_settings_are_read_as_their_fields_say():
    chosen = registry.parse_policy("hoard:size=7,decay=1e-3,warm=no,group=max,name=a b,least=9")
    assert chosen.settings == {
        "size": 7,
        "decay": 0.001,
        "warm": False,
        "group": "max",
        "name": "a b",
        "least": 9,
    }
    assert registry.parse_policy("hoard:least=none").config.least is None


def test_a_label_holds_what_differs_from_the_defaults_and_can_be_read_again():
    assert registry.parse_policy("hoard").label == "hoard"
    assert registry.parse_policy("hoard:").label == "hoard"
    assert registry.parse_policy("hoard:size=3").label == "hoard"
    chosen = registry.parse_policy("hoard:group=max,size=4")
    assert chosen.label == "hoard:size=4,group=max"
    assert registry.parse_policy(chosen.label) == chosen


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("hord", "Unknown policy 'hord': did you mean hoard"),
        ("xyzzyx", "Unknown policy 'xyzzyx': there are "),
        ("hoard:sice=3", "Unknown setting 'sice' of hoard: did you mean size?"),
        ("hoard:group=maximum", "takes one of mean, max, and not 'maximum'"),
        ("hoard:size=3.5", "takes a whole number, and not '3.5'"),
        ("hoard:size=", "takes a whole number, and not ''"),
        ("hoard:decay=nan", "takes a finite number"),
        ("hoard:decay=fast", "takes a number, and not 'fast'"),
        ("hoard:warm=maybe", "takes true or false, and not 'maybe'"),
        ("hoard:size", "has no value: write hoard:size=..."),
        ("hoard:size=1,size=2", "given twice"),
        ("hoard:size=0", "size has to be at least 1"),
        ("hoard:decay=-1", "not possible: ValueError: decay is negative"),
        ("broken", "cannot be loaded from fake_plugins_that_are_not_there:Gone"),
        ("tova:anything=1", "Unknown setting 'anything' of tova: there is none."),
    ],
)
def test_what_cannot_be_is_a_sentence(text, sentence):
    with pytest.raises(UserError) as refusal:
        registry.parse_policy(text)
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


WINDOW = {"window": 32, "kernel": 7, "pool": "max", "group": "mean", "shares": "head"}
OLD = WINDOW | {"decode": "reselect"}


@pytest.mark.parametrize(
    ("label", "settings", "now"),
    [
        ("snapkv", OLD, "snapkv:decode=reselect,votes=window"),
        ("snapkv:pool=avg", {**OLD, "pool": "avg"}, "snapkv:pool=avg,decode=reselect,votes=window"),
        ("snapkv:decode=append", {**WINDOW, "decode": "append"}, "snapkv"),
        ("snapkv:decode=reselect", {**WINDOW, "decode": "reselect", "votes": "running"}, "snapkv:decode=reselect"),
        ("snapkv:later=1", {**WINDOW, "decode": "append", "later": 1}, "snapkv:later=1"),  # of a later version
        ("h2o:group=max", {"group": "max", "shares": "head"}, "h2o:group=max"),
        ("h2o:group=max", {"group": "max"}, "h2o:group=max"),  # what the lacking setting was is not known
        ("gone:size=1", {"size": 1}, "gone:size=1"),
    ],
)
def test_a_result_s_label_says_what_it_was_made_with(label, settings, now):
    policy = {"name": label.partition(":")[0], "label": label, "settings": settings, "source": None}
    assert registry.recorded_policy(policy)[0] == now
    assert registry.recorded_policy(policy | {"source": "0" * 64}) == (label, settings)


def test_a_comma_list_keeps_settings_whole():
    assert registry.split_policies("tova,kvpop:label=max,window=32,h2o") == [
        "tova",
        "kvpop:label=max,window=32",
        "h2o",
    ]
    assert registry.split_policies("h2o:group=max") == ["h2o:group=max"]
    assert registry.split_policies("a:x=1, b:y=2,z=3 ,c") == ["a:x=1", "b:y=2,z=3", "c"]


MINE = '''
from dataclasses import dataclass
from evictbench.policy import Policy

@dataclass(frozen=True)
class Settings:
    window: int = 8

class Mine(Policy):
    """Mine."""
    name = "mine"
    summary = "my own"
    paper = "none"
    Config = Settings

    def score(self, step):
        return step.positions
'''


def test_a_policy_from_a_file(tmp_path):
    file = tmp_path / "my_policy.py"
    file.write_text(MINE)
    chosen = registry.parse_policy(f"{file}:Mine:window=9")
    assert (chosen.name, chosen.settings, chosen.label) == ("mine", {"window": 9}, "mine:window=9")
    again = registry.parse_policy(f"{file}:Mine")
    assert again.source == chosen.source
    file.write_text(MINE + "\n# changed\n")
    assert registry.parse_policy(f"{file}:Mine").source != chosen.source


@pytest.mark.parametrize(
    ("content", "ending", "sentence"),
    [
        (MINE, "", "Name the class in the file too"),
        (MINE, ":Mein", "Unknown class 'Mein' in "),
        (MINE, ":Settings", "it has to be a subclass of evictbench.policy.base.Policy"),
        (MINE.replace('paper = "none"', ""), ":Mine", "does not say its paper"),
        (MINE.replace("= Settings", "= 3"), ":Mine", "is not a dataclass"),
        (MINE.replace("score", "scores"), ":Mine", "The policy mine does not define score."),
        (MINE.replace("Policy", "RaggedPolicy"), ":Mine", "The policy mine does not define expiry."),
        (
            MINE.replace("Policy", "HeadBudgetPolicy").replace("score(", "score_at("),
            ":Mine",
            "The policy mine does not define features and evicted_in_chunk.",
        ),
        ("def (", ":Mine", "cannot be loaded: SyntaxError"),
        ("import nothing_of_that_name", ":Mine", "cannot be loaded: ModuleNotFoundError"),
        (None, ":Mine", "There is no policy file"),
    ],
)
def test_a_file_that_is_no_policy_is_a_sentence(tmp_path, content, ending, sentence):
    file = tmp_path / "my_policy.py"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError) as refusal:
        registry.parse_policy(f"{file}{ending}")
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)
