"""The documentation site builds without warnings and has every public name; README is short."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import rlcore
import rlcore.ops

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
_CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)+")


def built(source: Path, output: Path) -> subprocess.CompletedProcess[str]:
    """Run the command of ``make docs``."""
    pytest.importorskip("sphinx", reason="the site needs the extra [docs]")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", str(output / "trees")]
    return subprocess.run([*command, str(source), str(output)], capture_output=True, text=True, check=False)


def malformed(links: list[str]) -> list[str]:
    """Return the links that are no https address of a host with a name. No other site is asked."""
    parts = [(link, urlsplit(link)) for link in links]
    return [link for link, url in parts if url.scheme != "https" or not _NAME.fullmatch(url.netloc) or " " in link]


@pytest.mark.slow
def test_the_site_is_built_without_warnings(tmp_path: Path) -> None:
    found = built(DOCS, tmp_path)
    assert (found.returncode, found.stderr) == (0, "")
    names = set(re.findall(r'<dt class="sig sig-object py" id="([\w.]+)"', api_pages(tmp_path)))
    absent = [name for name in public_names() if name not in names]
    assert absent == []
    assert (tmp_path / "search.html").exists() and (tmp_path / "searchindex.js").stat().st_size > 100_000


@pytest.mark.slow
def test_a_dead_link_fails_the_build(tmp_path: Path) -> None:
    source = tmp_path / "docs"
    source.mkdir()
    (source / "conf.py").write_text((DOCS / "conf.py").read_text())
    (source / "index.md").write_text("# A\n\n[to a heading](#b) and [to a page](c.md)\n")
    found = built(source, tmp_path / "site")
    assert found.returncode == 1
    assert re.findall(r"cross-reference target not found: '(.*?)'", found.stderr) == ["b", "c.md"]


def test_every_public_name_is_in_the_source_of_the_api_reference() -> None:
    sources = "\n".join(page.read_text("utf-8") for page in (DOCS / "api").glob("*.md"))
    listed = re.findall(r"^\.\. (?:auto\w+|py:decorator):: ([\w.]+)$", sources, re.MULTILINE)
    assert [name for name in public_names() if name not in listed] == []
    assert len(listed) == len(set(listed))


def test_every_page_is_in_the_contents() -> None:
    listed = {page for folder in (DOCS, DOCS / "api") for page in contents(folder)}
    made = DOCS / "results.md"
    assert listed | {DOCS / "index.md"} == {page for page in PAGES if page.is_relative_to(DOCS)} | {made}


def contents(folder: Path) -> set[Path]:
    """The pages that a folder's index.md lists."""
    text = (folder / "index.md").read_text("utf-8")
    lists = re.findall(r"^```\{toctree\}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return {folder / f"{name}.md" for name in re.findall(r"^[\w/]+$", "\n".join(lists), re.MULTILINE)}


def addresses(text: str) -> list[str]:
    prose = _CODE.sub("", text)
    return re.findall(r"\]\((\w+:[^)]*)\)", prose) + re.findall(r"(?<!\()\bhttps?://[^\s)>]+", prose)


def test_links_to_other_sites_are_addresses() -> None:
    assert {str(page): bad for page in PAGES if (bad := malformed(addresses(page.read_text("utf-8"))))} == {}


def test_a_malformed_address_is_found() -> None:
    good = ["https://a.b-c.org/d?e#f", "https://semver.org/spec/v2.0.0.html"]
    bad = [
        "http://a.org",
        "https://a",
        "https:/a.org",
        "https://a b.org",
        "https://a..org/",
        "mailto:x",
        "https://-a.org",
    ]
    assert malformed(good + bad) == bad


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 180


def public_names() -> list[str]:
    return [*(f"rlcore.{name}" for name in rlcore.__all__), *(f"rlcore.ops.{name}" for name in rlcore.ops.__all__)]


def api_pages(site: Path) -> str:
    return "\n".join(page.read_text("utf-8") for page in (site / "api").glob("*.html"))
