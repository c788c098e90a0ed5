"""Every Python block of ``docs/subject.md`` runs as it stands, and what the docs point to exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from accum_plugin.rules import RULES

DOCS = Path(__file__).parents[1] / "docs"
SUBJECT = DOCS / "subject.md"


def _blocks(path: Path) -> list[tuple[int, str]]:
    """Return each Python block with the line its code begins at."""
    text = path.read_text(encoding="utf-8")
    matches = re.finditer(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(1)), match.group(1)) for match in matches]


SUBJECT_BLOCKS = [pytest.param(line, code, id=f"line{line + 1}") for line, code in _blocks(SUBJECT)]


@pytest.mark.parametrize(("line", "code"), SUBJECT_BLOCKS)
def test_block_runs(line: int, code: str) -> None:
    assert "assert " in code, "a snippet shows what it says by an assertion"
    padded = "\n" * line + code  # so that a traceback gives the line in the page
    exec(compile(padded, str(SUBJECT), "exec"), {"__name__": "subject"})


def test_every_section_has_a_snippet() -> None:
    sections = re.split(r"^## (.+)$", SUBJECT.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert [title for title, text in zip(sections[1::2], sections[2::2], strict=True) if "```python" not in text] == []


def test_migrating_blocks_are_python() -> None:
    blocks = _blocks(DOCS / "migrating.md")
    assert len(blocks) >= 8
    for line, code in blocks:
        compile("\n" * line + code, "migrating.md", "exec")


@pytest.mark.parametrize("name", ["subject.md", "migrating.md"])
def test_codes_and_links_exist(name: str) -> None:
    text = (DOCS / name).read_text(encoding="utf-8")
    codes = set(re.findall(r"ACC\d{3}", text))
    assert codes and codes <= set(RULES)
    headings = {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    }
    for target in re.findall(r"\]\((?!https://)([^)]+)\)", text):
        assert target[1:] in headings if target.startswith("#") else (DOCS / target).is_file(), target
