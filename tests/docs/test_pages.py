"""The files and headings that the documents speak of exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
MADE = {"docs/results.md"}
"""``make results`` writes these."""
FOLDERS = ("bench", "collectives", "devices", "docs", "engines", "examples", "kernels", "rlcore", "src", "tests")
_PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})/[\w./-]*(?:/|\.(?:py|toml|json|md|cpp))(?![\w/])")
_FILE = re.compile(r"[\w/]+\.py\b|\b[\w/]+/(?=`)")


def anchors(page: str) -> set[str]:
    """The ids that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path) -> list[str]:
    """Those to files and to headings; other sites are not asked."""
    found = []
    for link in re.findall(r"\]\(([^):]+)\)", page.read_text("utf-8")):
        file, _, heading = link.partition("#")
        there = page.parent / file if file else page
        if not there.exists() or (heading and heading not in anchors(there.read_text("utf-8"))):
            found.append(link)
    return found


def absent_files(text: str, root: Path) -> list[str]:
    """The paths from the root in a text that lead nowhere."""
    return sorted({path for path in _PATH.findall(text) if path not in MADE and not (root / path).exists()})


def table_of_tasks() -> list[list[str]]:
    """The rows of "Where to begin", without its head."""
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    rows = page.partition("## Where to begin\n")[2].partition("\n## ")[0].split("\n| ")[1:]
    return [row.removesuffix(" |").split(" | ") for row in rows[2:]]


def test_links_of_a_page_lead_somewhere() -> None:
    assert len(PAGES) > 30
    assert {str(page): dead for page in PAGES if (dead := dead_links(page))} == {}


def test_paths_in_a_page_exist() -> None:
    assert {str(page): absent for page in PAGES if (absent := absent_files(page.read_text("utf-8"), ROOT))} == {}


def test_short_names_of_files_in_the_architecture_exist() -> None:
    """Within its part the page leaves out the folder: ``train.py``, ``sampling/hf/``."""
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    known = [str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    named = {file.rstrip("/") for file in _FILE.findall(page)} - set(FOLDERS)
    assert len(named) > 50
    assert [file for file in sorted(named) if not any(f"/{path}".endswith(f"/{file}") for path in known)] == []


def test_every_folder_of_the_package_is_in_the_architecture() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    folders = {path.parent.name for path in (ROOT / "rlcore").glob("*/*.py") if not path.parent.is_symlink()}
    assert "cli" in folders
    assert [folder for folder in sorted(folders) if f" {folder}/" not in page] == []


def test_each_task_of_the_architecture_begins_at_files_that_exist() -> None:
    tasks = table_of_tasks()
    assert [len(row) for row in tasks] == [3] * 9
    for task, read, write in tasks:
        for cell in (read, write):
            named = re.findall(r"`([\w./]+/[\w./]*)`", cell)
            assert named and [path for path in named if not (ROOT / path).exists()] == [], task


def test_a_dead_link_and_an_absent_file_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    linked = "# A *b*: c\n[1](page.md#a-b-c) [2](#a-b-d) [3](other.md) [4](https://x.y/z)\n```\n# no\n```\n[5](#no)"
    page.write_text(linked)
    assert dead_links(page) == ["#a-b-d", "other.md", "#no"]
    (tmp_path / "kernels").mkdir()
    text = "`kernels/` `kernels/gae` `kernels/gae.py`, `docs/results.md`, /tmp/kernels/x.py and `bench/old/` are"
    assert absent_files(text, tmp_path) == ["bench/old/", "kernels/gae.py"]
