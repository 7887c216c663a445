"""Every decision says whether it holds, the index lists all of them, and links lead somewhere."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DECISIONS = ROOT / "docs" / "decisions"
PAGES = sorted(DECISIONS.glob("[0-9]*.md"))
LINK = re.compile(r"\[([^]]*)\]\(([^)\s]+)\)", re.DOTALL)
STATUS = re.compile(r"Status: (holds[.;:]|(extended|revised|superseded) by \[\d+\]\().*")
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
DOCS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def plain(text: str) -> str:
    """Without links, up to where the reason begins."""
    return re.split(r"[;:.]", LINK.sub(r"\1", text))[0]


def head(page: Path) -> tuple[int, str, str]:
    """Number, title and status of a decision."""
    lines = page.read_text().splitlines()
    title = re.fullmatch(r"# (\d+)\. (.+)", lines[0])
    assert title, f"{page.name}: the first line is `# number. title`"
    assert STATUS.fullmatch(lines[2]), f"{page.name}: the third line is not a status: {lines[2]}"
    return int(title[1]), title[2], plain(lines[2].removeprefix("Status: "))


@cache
def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    found = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    words = [re.sub(r"[^\w\- ]", "", LINK.sub(r"\1", one)).lower() for one in found]
    return {one.strip().replace(" ", "-") for one in words}


def broken(page: Path) -> list[str]:
    found = []
    for _, target in LINK.findall(FENCED.sub("", page.read_text())):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        at = (page.parent / name).resolve() if name else page
        if not at.exists() or (anchor and at.suffix == ".md" and anchor not in anchors(at)):
            found.append(target)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name[:4])
def test_a_decision_has_a_number_and_a_status(page: Path) -> None:
    number, _, _ = head(page)
    assert page.name.startswith(f"{number:04}-")


def test_the_index_lists_every_decision_with_its_status() -> None:
    rows = [
        f"| {number} | [{title}]({page.name}) | {status} |"
        for page, (number, title, status) in ((page, head(page)) for page in PAGES)
    ]
    lines = (DECISIONS / "README.md").read_text().splitlines()
    assert [line for line in lines if re.match(r"\| \d", line)] == rows


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert not broken(page)


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One Two\n[a](none.md) [b](#one-two) [c](#none)\n[d](https://e) [e](page.md)\n"
    )
    assert broken(page) == ["none.md", "#none"]
