"""The rules' pages: read from the docstrings, written to ``docs/rules``, shown in the terminal.

``python -m accum_plugin.rules.pages docs/rules`` writes one page per rule and the index.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import sys
from pathlib import Path

from rich.markdown import Markdown
from rich.table import Table

from accum_plugin.rules import RULES, Rule

SECTIONS = (
    "What it does",
    "Why is this bad?",
    "Example",
    "Use instead",
    "Fix",
    "When it is silent",
    "Options",
    "References",
)

FAMILIES = {
    "1": "Scale and weights",
    "2": "Inside the window and at its boundary",
    "3": "Objective",
    "4": "Data",
    "9": "The plugin itself",
}


@dataclasses.dataclass(frozen=True)
class Page:
    """A rule's docstring, taken apart.

    Args:
        summary: The one line that says what the rule catches.
        sections: Text of each section under its title, in the order of :data:`SECTIONS`.
    """

    summary: str
    sections: dict[str, str]

    @property
    def corrects(self) -> bool:
        """Whether the plugin puts right what the rule finds."""
        return self.sections["Fix"].startswith("Corrected")


def parse_page(rule: type[Rule]) -> Page:
    """Take a rule's docstring apart.

    Args:
        rule: The rule.

    Raises:
        ValueError: If there is no one-line summary, or the sections are not exactly :data:`SECTIONS`, each with a text.
    """
    head, *rest = re.split(r"^## (.+)$", inspect.cleandoc(rule.__doc__ or ""), flags=re.MULTILINE)
    summary, titles = head.strip(), tuple(rest[::2])
    if not summary or "\n" in summary:
        raise ValueError(f"{rule.code}: the docstring must begin with a summary of one line, not {summary!r}")
    if titles != SECTIONS:
        raise ValueError(f"{rule.code}: the docstring has the sections {titles}; it must have {SECTIONS}")
    sections = {title: text.strip() for title, text in zip(titles, rest[1::2], strict=True)}
    for title, text in sections.items():
        if not text:
            raise ValueError(f"{rule.code}: the section {title!r} of the docstring is empty")
    return Page(summary, sections)


def page_file(rule: type[Rule]) -> str:
    """Return the name of a rule's page, for example ``"ACC105-partial-window.md"``."""
    return f"{rule.code}-{rule.name}.md"


def page_markdown(rule: type[Rule]) -> str:
    """Return a rule's page as Markdown.

    Raises:
        ValueError: As :func:`parse_page`.
    """
    page = parse_page(rule)
    source = rule.__module__.replace(".", "/") + ".py"
    parts = [f"<!-- Generated from the docstring in {source}: edit it there. -->", f"# {rule.name} ({rule.code})"]
    parts += [page.summary, f"In short: {rule.why} {rule.remedy}"]
    parts += [f"## {title}\n\n{text}" for title, text in page.sections.items()]
    return "\n\n".join(parts) + "\n"


def index_markdown() -> str:
    """Return ``docs/rules/README.md``: a table of all rules, by family."""
    parts = [
        "<!-- Generated from the docstrings in accum_plugin/rules: edit them there. -->",
        "# Rules",
        "What the plugin checks. `accum-plugin explain CODE` shows a page in the terminal; "
        '`ignore=("ACC301",)` silences a rule. `n` is the number of data-parallel ranks, `K` the accumulation steps, '
        "`m` the microbatches really in the window.",
    ]
    for digit, family in FAMILIES.items():
        rows = [_index_row(rule) for rule in sorted_rules() if rule.code[3] == digit]
        head = [f"## {family}", "", "| code | name | what it catches | fix |", "| --- | --- | --- | --- |"]
        parts.append("\n".join(head + rows))
    return "\n\n".join(parts) + "\n"


def _index_row(rule: type[Rule]) -> str:
    page = parse_page(rule)
    fix = "yes" if page.corrects else "no"
    return f"| [{rule.code}]({page_file(rule)}) | {rule.name} | {page.summary} | {fix} |"


def sorted_rules() -> list[type[Rule]]:
    """Return all rules in the order of their codes."""
    return [RULES[code] for code in sorted(RULES)]


def all_pages() -> dict[str, str]:
    """Return every page of ``docs/rules`` under its file name, the index included."""
    return {page_file(rule): page_markdown(rule) for rule in sorted_rules()} | {"README.md": index_markdown()}


def write_pages(directory: Path) -> None:
    """Write every page, and remove pages of rules that are gone or were renamed.

    Args:
        directory: Where the pages go; made where it does not exist.
    """
    pages = all_pages()
    directory.mkdir(parents=True, exist_ok=True)
    for stale in directory.glob("ACC*.md"):
        if stale.name not in pages:
            stale.unlink()
    for name, text in pages.items():
        (directory / name).write_text(text, encoding="utf-8")


def render_table() -> Table:
    """Return the table that ``accum-plugin rules`` prints."""
    table = Table("code", "name", "what it catches", "fix", title="accum-plugin rules", title_justify="left")
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    family = ""
    for rule in sorted_rules():
        if family and rule.code[3] != family:
            table.add_section()
        family, page = rule.code[3], parse_page(rule)
        table.add_row(rule.code, rule.name, page.summary.replace("`", ""), "yes" if page.corrects else "no")
    return table


def render_page(code: str) -> Markdown:
    """Return the page that ``accum-plugin explain CODE`` prints.

    Args:
        code: A rule's code or name, in either case.

    Raises:
        ValueError: If no rule has this code or name; the message quotes it and gives the closest.
    """
    rule = find_rule(code)
    body = page_markdown(rule).split("-->", 1)[1]  # terminals would print the comment
    return Markdown(body.strip())


def find_rule(code: str) -> type[Rule]:
    """Find a rule by its code or name.

    Args:
        code: A rule's code or name, in either case.

    Raises:
        ValueError: If no rule has this code or name; the message quotes it and gives the closest.
    """
    known = {key: rule for rule in sorted_rules() for key in (rule.code.lower(), rule.name)}
    if code.lower() in known:
        return known[code.lower()]
    closest = difflib.get_close_matches(code.lower(), known, n=1)
    hint = f"did you mean {known[closest[0]].code}?" if closest else "`accum-plugin rules` lists them"
    raise ValueError(f"{code!r} is not a rule; {hint}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m accum_plugin.rules.pages DIRECTORY")
    write_pages(Path(sys.argv[1]))
