"""Texts and blocks: what is read, what is refused, how it is cut."""

import json

import datasets
import pytest
from fake_plugins import make_tokenizer

from evictbench.errors import UserError
from evictbench.train.data import load_blocks, make_blocks, read_texts


@pytest.fixture
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def blocks(tokenizer, tmp_path):
    def call(*records, length=16, pack=True, most=100, seed=0):
        file = tmp_path / "texts.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
        texts = read_texts([str(file)], {}, tokenizer, length, seed)
        return make_blocks(texts, tokenizer, tmp_path / "blocks", length=length, pack=pack, most=most, seed=seed)

    return call


TEXTS = [{"text": f"text number {number} has its own end."} for number in range(12)]


def test_packing_loses_and_repeats_nothing(blocks, tokenizer):
    cut = blocks(*TEXTS)
    ids = [token for block in (cut[i] for i in range(len(cut))) for token in block[0].tolist()]
    assert {cut[i].shape for i in range(len(cut))} == {(1, 16)}
    texts = tokenizer.decode(ids).split("</s>")
    whole = [text.removeprefix("<s>") for text in texts[:-1]]
    assert sorted(whole) == sorted(record["text"] for record in TEXTS[: len(TEXTS)] if record["text"] in whole)
    assert len(whole) >= len(TEXTS) - 1
    assert ids.count(tokenizer.bos_token_id) <= len(TEXTS)


def test_no_more_texts_are_read_than_blocks_are_asked_for(blocks):
    cut = blocks(*TEXTS, most=2)
    assert (len(cut), cut.documents < len(TEXTS)) == (2, True)
    assert [cut[i].tolist() for i in range(2)] == [blocks(*TEXTS)[i].tolist() for i in range(2)]


def test_texts_left_alone_are_one_block_each(blocks, tokenizer):
    cut = blocks(*TEXTS[:3], {"text": "x" * 99}, length=40, pack=False)
    texts = sorted(tokenizer.decode(cut[i][0]) for i in range(len(cut)))
    assert texts == sorted(["<s>" + "x" * 39, *(f"<s>{record['text']}" for record in TEXTS[:3])])


def test_a_text_that_begins_with_bos_gets_no_second_one(blocks, tokenizer):
    cut = blocks({"text": "<s>hello there"}, pack=False, length=40)
    assert cut[0][0].tolist().count(tokenizer.bos_token_id) == 1


def test_the_seed_orders_the_texts_and_the_same_one_finds_the_same_blocks(blocks, tmp_path):
    first = blocks(*TEXTS, seed=1)
    stamp = (tmp_path / "blocks" / "tokens.npy").stat().st_mtime_ns
    assert blocks(*TEXTS, seed=1).sha256 == first.sha256
    assert (tmp_path / "blocks" / "tokens.npy").stat().st_mtime_ns == stamp
    assert blocks(*TEXTS, seed=2).sha256 != first.sha256
    assert load_blocks(tmp_path / "blocks").sha256 == blocks(*TEXTS, seed=2).sha256


def test_questions_and_conversations_become_texts(blocks, tokenizer):
    cut = blocks(
        {"question": " How many? ", "answer": "4 * 2 = <<4*2=8>>8"},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
        pack=False,
        length=99,
    )
    assert sorted(tokenizer.decode(cut[i][0]) for i in range(2)) == [
        "<s><user>hi</s><bot>ho</s>",
        "<s>Question: How many?\nAnswer: 4 * 2 = 8",
    ]


def test_every_kind_of_source_is_read(tokenizer, tmp_path):
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text("plain text")
    (folder / "deep" / "b.json").write_text(json.dumps([{"text": "listed"}]))
    (folder / "notes.md").write_text("not read")
    texts = read_texts([str(folder), "own"], {"own": "toy_policies:words"}, tokenizer, 3, 7)
    assert [texts.get(i) for i in range(texts.count)] == ["plain text", "listed"] + ["word 7 word 7 word 7 "] * 4


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("empty.jsonl", "", "holds no text to train on"),
        ("blank.jsonl", '{"text": "  "}\n', "holds no text to train on"),
        ("blank.txt", "  \n", "holds no text to train on"),
        ("broken.jsonl", '{"text": "a"}\n{"text', "line 2 is not valid JSON"),
        ("other.jsonl", '{"prompt": "a"}\n', "record 1 has no text"),
        ("bytes.txt", b"\xff\xfe\x00", "is not UTF-8 text"),
        ("file.csv", "a,b", "is neither .jsonl nor .json nor .parquet"),
        ("short.jsonl", '{"text": "a"}\n', "fewer than 16 tokens together"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(tokenizer, tmp_path, name, content, sentence):
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=sentence) as raised:
        make_blocks(
            read_texts([str(file)], {}, tokenizer, 16, 0), tokenizer, tmp_path, length=16, pack=True, most=9, seed=0
        )
    assert str(raised.value).endswith(".")


def test_an_empty_folder_and_a_dataset_out_of_reach_are_refused(tokenizer, tmp_path):
    with pytest.raises(UserError, match="holds no text: looked for"):
        read_texts([str(tmp_path)], {}, tokenizer, 16, 0)
    with pytest.raises(UserError, match="neither a file here nor to be had from the hub"):
        read_texts(["nobody/nothing"], {}, tokenizer, 16, 0)


def test_a_hub_dataset_is_read_by_name_config_and_split(tokenizer, monkeypatch):
    rows = datasets.Dataset.from_list([{"question": "one?", "answer": "1"}, {"question": "two?", "answer": "2"}])
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *named, **split: asked.append((named, split)) or rows)
    texts = read_texts(["own/solved:main:test"], {}, tokenizer, 16, 0)
    assert [texts.get(i) for i in range(texts.count)] == ["Question: one?\nAnswer: 1", "Question: two?\nAnswer: 2"]
    assert asked == [(("own/solved", "main"), {"split": "test"})]
