"""Links between pages, to files and to headings lead somewhere; nothing is asked of the network."""

from pathlib import Path

import pytest
from pages import PAGES, ROOT, anchors, links

CARDS = sorted((ROOT / "suites").glob("*/README.md"))


def broken(page: Path) -> list[str]:
    found = []
    for target in links(page):
        if target.startswith(("https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or not file.is_relative_to(ROOT):
            found.append(f"{target}: there is no such file")
        elif anchor and anchor not in anchors(file):
            found.append(f"{target}: there is no such heading")
    return found


@pytest.mark.parametrize("page", [*PAGES, *CARDS], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert not broken(page)


def test_broken_links_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr("test_links.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# One heading\n[a](missing.md) [b](#no-heading) [c](#one-heading) [d](page.md#two)\n")
    assert [line.partition(":")[0] for line in broken(page)] == ["missing.md", "#no-heading", "page.md#two"]


def test_every_page_is_linked_from_another_page():
    """A page that nobody links to is not found by anybody."""
    linked = {(page.parent / target.partition("#")[0]).resolve() for page in PAGES for target in links(page)}
    assert {page.name for page in PAGES if page not in linked} <= {"README.md"}
