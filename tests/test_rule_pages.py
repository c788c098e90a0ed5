"""Every rule has a page, complete and up to date, and words its finding as the others do."""

from __future__ import annotations

import dataclasses
import io
import re
import textwrap
from pathlib import Path

import pytest
from rich.console import Console

from accum_plugin.rules import RULES, Rule
from accum_plugin.rules.pages import SECTIONS, all_pages, find_rule, parse_page, render_page, render_table, write_pages
from accum_plugin.settings import Settings

PAGES = Path(__file__).parents[1] / "docs" / "rules"

NAMES = {
    "ACC101": "global-mean-averaged",
    "ACC102": "local-mean-summed",
    "ACC103": "accumulation-divided-twice",
    "ACC104": "accumulation-not-divided",
    "ACC105": "partial-window",
    "ACC106": "unequal-microbatches",
    "ACC107": "unequal-ranks",
    "ACC108": "sum-loss-averaged",
    "ACC109": "unexplained-scale",
    "ACC110": "unknown-reduction",
    "ACC111": "ranks-diverge",
    "ACC201": "gradients-cleared-in-window",
    "ACC202": "step-every-microbatch",
    "ACC203": "scheduler-per-microbatch",
    "ACC204": "clip-per-microbatch",
    "ACC205": "window-never-stepped",
    "ACC206": "amp-order",
    "ACC207": "sync-every-microbatch",
    "ACC208": "backward-bypassed",
    "ACC209": "scheduler-horizon",
    "ACC301": "batch-statistics",
    "ACC302": "coupled-loss",
    "ACC303": "not-equivalent",
    "ACC401": "effective-batch-changed",
    "ACC402": "duplicated-samples",
    "ACC901": "loss-unreadable",
    "ACC902": "plugin-disabled",
}

each_rule = pytest.mark.parametrize("code", NAMES)


def test_codes_and_names_are_stable() -> None:
    assert {code: rule.name for code, rule in RULES.items()} == NAMES


def test_files_are_exactly_the_pages() -> None:
    assert {path.name for path in PAGES.iterdir()} == {f"{code}-{name}.md" for code, name in NAMES.items()} | {
        "README.md"
    }


def test_files_are_up_to_date() -> None:
    stale = [name for name, text in all_pages().items() if (PAGES / name).read_text(encoding="utf-8") != text]
    assert not stale, "run: python -m accum_plugin.rules.pages docs/rules"


def test_index_links_to_every_page() -> None:
    index = (PAGES / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\]\((ACC.*?\.md)\)", index) == [f"{code}-{name}.md" for code, name in NAMES.items()]


@each_rule
def test_page_has_every_section_in_order(code: str) -> None:
    text = (PAGES / f"{code}-{NAMES[code]}.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", text, flags=re.MULTILINE) == list(SECTIONS)


@each_rule
def test_examples_are_python(code: str) -> None:
    sections = parse_page(RULES[code]).sections
    examples = [re.search(r"```python\n(.*?)```", sections[title], re.DOTALL) for title in ("Example", "Use instead")]
    sources = [match.group(1) for match in examples if match]
    assert len(sources) == 2 and sources[0] != sources[1]
    for source in sources:
        compile(source, code, "exec")


@each_rule
def test_options_name_real_keywords_and_how_to_ignore(code: str) -> None:
    options = parse_page(RULES[code]).sections["Options"]
    keywords = set(re.findall(r"^- `(\w+)", options, flags=re.MULTILINE))
    assert keywords <= {field.name for field in dataclasses.fields(Settings)}
    assert f'ignore=("{code}",)' in options


@each_rule
def test_references_are_links(code: str) -> None:
    for line in parse_page(RULES[code]).sections["References"].splitlines():
        assert re.match(r"- https://\S+( \(.+\))?$", line) or line.startswith("  "), line


@each_rule
def test_finding_is_worded_as_sentences_without_numbers(code: str) -> None:
    rule = RULES[code]
    assert re.fullmatch(r"[A-Z].*\.", rule.why)
    assert not re.search(r"\d", rule.why.replace("fp16", ""))
    assert re.fullmatch(r"[A-Z].*\.", rule.remedy)
    message = rule.finding("seen 4.00.").message
    assert message == f"{code} ({NAMES[code]}): seen 4.00. {rule.why} {rule.remedy} More: accum-plugin explain {code}"


@each_rule
def test_page_is_shown_in_the_terminal(code: str) -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render_page(code.lower()))
    shown = console.export_text()
    assert f"{NAMES[code]} ({code})" in shown and all(title in shown for title in SECTIONS)
    assert "<!--" not in shown


def test_table_lists_every_rule() -> None:
    table = render_table()
    assert [list(column.cells) for column in table.columns[:2]] == [list(NAMES), list(NAMES.values())]


def test_a_rule_is_found_by_name_and_a_typo_is_answered() -> None:
    assert find_rule("partial-window") is RULES["ACC105"]
    with pytest.raises(ValueError, match="'ACC15' is not a rule; did you mean ACC105"):
        find_rule("ACC15")
    with pytest.raises(ValueError, match="accum-plugin rules"):
        find_rule("?")


def _rule_with(doc: str) -> type[Rule]:
    """A stand-in that does not register: only the docstring matters."""
    return type("Draft", (), {"code": "ACC000", "__doc__": textwrap.dedent(doc)})  # type: ignore[return-value]


def test_an_incomplete_page_is_refused() -> None:
    full = "What it catches.\n\n" + "\n".join(f"## {title}\ntext" for title in SECTIONS)
    assert list(parse_page(_rule_with(full)).sections) == list(SECTIONS)
    with pytest.raises(ValueError, match="has the sections"):
        parse_page(_rule_with(full.replace("## Fix\ntext\n", "")))
    with pytest.raises(ValueError, match="'Fix' of the docstring is empty"):
        parse_page(_rule_with(full.replace("## Fix\ntext\n", "## Fix\n")))
    with pytest.raises(ValueError, match="summary of one line"):
        parse_page(_rule_with(full.removeprefix("What it catches.")))


def test_writing_removes_pages_of_rules_that_are_gone(tmp_path: Path) -> None:
    (tmp_path / "ACC999-gone.md").touch()
    (tmp_path / "notes.md").touch()
    write_pages(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*all_pages(), "notes.md"}
