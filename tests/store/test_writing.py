"""A file that the user names, whatever is there: links are followed, devices and pipes are written through."""

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from evictbench.errors import UserError, WriteFailed
from evictbench.store.files import append_line, check_file, check_writable, saving, write_json, write_text, writing


def test_a_new_file_gets_its_folder_and_an_old_one_keeps_its_mode(tmp_path):
    write_text(tmp_path / "new" / "folder" / "page.html", "one")
    assert (tmp_path / "new" / "folder" / "page.html").read_text() == "one"
    private = tmp_path / "private"
    private.write_text("before")
    private.chmod(0o600)
    write_text(private, "after")
    assert private.read_text() == "after"
    assert stat.S_IMODE(private.stat().st_mode) == 0o600


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path, there):
    (tmp_path / "elsewhere").mkdir()
    target = tmp_path / "elsewhere" / "page.html"
    if there:
        target.write_text("before")
    (tmp_path / "first").symlink_to("second")
    (tmp_path / "second").symlink_to(target)
    check_file(tmp_path / "first", "The report")
    write_text(tmp_path / "first", "after")
    assert target.read_text() == "after"
    assert (tmp_path / "first").is_symlink()
    assert (tmp_path / "second").is_symlink()
    assert {file.name for file in (tmp_path / "elsewhere").iterdir()} == {"page.html"}


def test_a_pipe_is_written_through(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    check_file(pipe, "The report")
    write_text(pipe, "through")
    reader.join()
    assert read == ["through"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_device_and_a_file_that_is_open_are_written_through(tmp_path):
    check_file(Path("/dev/null"), "The report")
    write_text(Path("/dev/null"), "nothing")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with (tmp_path / "open").open("w+") as file:
        before = os.fstat(file.fileno()).st_ino
        write_text(Path(f"/dev/fd/{file.fileno()}"), "kept")
        assert (os.stat(tmp_path / "open").st_ino, file.read()) == (before, "kept")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no device that is always full")
def test_a_full_device_is_a_sentence():
    with pytest.raises(WriteFailed, match=r"^/dev/full cannot be written: No space left on device\.$"):
        write_text(Path("/dev/full"), "too much")


def test_what_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path):
    page = tmp_path / "page.html"
    page.write_text("before")

    def fail():
        with writing(page) as file:
            file.write_text("half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(WriteFailed, match=r"page\.html cannot be written: No space left on device\."):
        fail()
    assert page.read_text() == "before"
    assert list(tmp_path.iterdir()) == [page]


def test_no_link_in_a_results_folder_decides_what_else_is_written(tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("mine")
    for name in ("summary.json", "samples.jsonl"):
        (tmp_path / name).symlink_to(mine)
    write_json(tmp_path / "summary.json", {"a": 1})
    assert not (tmp_path / "summary.json").is_symlink()
    with pytest.raises(WriteFailed, match=r"samples\.jsonl cannot be written"):
        append_line(tmp_path / "samples.jsonl", b"{}\n")
    assert mine.read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("folder", "is a folder, and the report is a file"),
        ("file/page.html", "is a file; the report needs a folder"),
        ("a" * 300, "The report cannot be written to .*: File name too long"),
        ("a/" * 3000 + "page.html", "File name too long"),
        ("loop", "The report cannot be written to .*: Too many levels of symbolic links"),
        ("caf\udce9/page.html", "is not UTF-8"),
        ("null\0byte/page.html", "not UTF-8 text|null byte"),
    ],
)
def test_what_cannot_be_written_is_found_before_the_work(tmp_path, name, sentence):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError, match=sentence) as raised:
        check_file(tmp_path / name, "The report")
    assert len(str(raised.value)) < 600 + len(str(tmp_path)) * 3


@pytest.mark.parametrize("name", ["a" * 300, "b/" * 3000, "null\0byte", "caf\udce9"])
def test_a_folder_that_cannot_be_made_is_found_before_the_work(tmp_path, name):
    with pytest.raises(UserError, match="Results cannot be written to"):
        check_writable(tmp_path / name, "Results", "results need")


@pytest.mark.parametrize(
    "error", [RuntimeError("PytorchStreamWriter failed.\nat line 3"), OSError(28, "No space left")]
)
def test_what_libraries_raise_while_they_write_names_the_file(tmp_path, error):
    def fail():
        with saving(tmp_path / "learner.pt"):
            raise error

    with pytest.raises(
        WriteFailed, match=r"learner\.pt cannot be written: (PytorchStreamWriter failed|No space left)\.$"
    ):
        fail()
