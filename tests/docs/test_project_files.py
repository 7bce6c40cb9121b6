"""Version, date, citation and the forms for issues say the same, and what they name exists."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import rlcore

ROOT = Path(__file__).resolve().parents[2]
FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")


def loaded(path: Path) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="comes with transformers")
    found = yaml.safe_load(path.read_text("utf-8"))
    assert isinstance(found, dict)
    return found


def released() -> tuple[str, str]:
    """The newest version of the changelog, and its date."""
    found = re.search(
        r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert found is not None
    return found[1], found[2]


def test_the_citation_and_the_changelog_have_the_version_of_the_package() -> None:
    version, date = released()
    citation = loaded(ROOT / "CITATION.cff")
    assert version == rlcore.__version__
    assert (citation["version"], str(citation["date-released"])) == (version, date)
    assert citation["cff-version"] == "1.2.0" and citation["license"] == "Apache-2.0"
    assert {"message", "title", "authors"} <= set(citation)


def test_the_page_of_installation_names_the_wheel_of_this_version_and_every_extra() -> None:
    page = (ROOT / "docs" / "installation.md").read_text()
    assert set(re.findall(r"rlcore-([\d.]+)-py3", page)) == {rlcore.__version__}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE)
    assert sorted(rows) == sorted([*extras, *extras]), "a row in the table of extras, and one in that of versions"


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_has_what_the_format_asks_for(path: Path) -> None:
    form = loaded(path)
    assert {"name", "description", "body"} <= set(form) <= {"name", "description", "title", "labels", "body"}
    ids = [part["id"] for part in form["body"]]
    assert ids and len(ids) == len(set(ids))
    assert {part["type"] for part in form["body"]} <= {"markdown", "textarea", "input", "dropdown", "checkboxes"}
    assert all(part["attributes"]["label"] for part in form["body"])
    assert any(part.get("validations", {}).get("required") for part in form["body"])


def test_the_stability_page_lists_every_deprecated_name() -> None:
    page = (ROOT / "docs" / "stability.md").read_text()
    sources = [path for folder in ("rlcore", "engines", "kernels") for path in (ROOT / folder).rglob("*.py")]
    texts = (path.read_text("utf-8") for path in sources)
    found = {name for text in texts for name in re.findall(r"the former name of ``(\w+)``, deprecated", text, re.I)}
    assert found and [name for name in sorted(found) if f"{name}" not in page] == []
