"""The command line: ``accum-plugin demo``, ``rules``, ``explain``, ``configure`` and ``report``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Check and correct gradient accumulation and data-parallel averaging.",
)


@app.command()
def demo(
    ranks: Annotated[int, typer.Option(help="Data-parallel processes to start, 1 to 32.")] = 8,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the measurements to this file.")] = None,
) -> None:
    """Train on real gloo ranks and measure what reaches the optimizer, without and with the plugin."""
    from accum_plugin.demo import DemoError, demo_tables, run_demo

    console = Console()
    try:
        with console.status("starting") as status:
            result = run_demo(ranks, progress=lambda text: _progress(console, status, text))
    except DemoError as error:
        raise _failure(str(error)) from None
    for table in demo_tables(result):
        console.print(table)
        console.print()
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2) + "\n")
        console.print(f"Measurements written to {json_file}", soft_wrap=True)


@app.command()
def rules() -> None:
    """List every rule: its code, its name and what it catches."""
    from accum_plugin.rules.pages import render_table

    Console().print(render_table())


@app.command()
def explain(code: Annotated[str, typer.Argument(help="A rule's code, for example ACC101.")]) -> None:
    """Show a rule's page: what it does, why it matters, an example and what to write instead."""
    from accum_plugin.rules import RULES
    from accum_plugin.rules.pages import render_page

    if code.upper() not in RULES:
        raise _failure(f"{code!r} is not a rule's code; `accum-plugin rules` lists them")
    Console().print(render_page(code.upper()))


@app.command()
def configure(
    mode: Annotated[str, typer.Option(help="fix, warn, raise, or off.")] = "fix",
    rewrite: Annotated[str | None, typer.Option(help="What a fix changes: loss or reduction.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Run the one-step equivalence check first.")] = False,
    ignore: Annotated[list[str] | None, typer.Option(help="A rule's code to silence; may be repeated.")] = None,
    config_file: Annotated[
        Path | None, typer.Option(help="The accelerate config file; accelerate's default one if left out.")
    ] = None,
) -> None:
    """Write the `accum_plugin` key into an accelerate config file, so that `accelerate launch` honors it."""
    from accum_plugin.configure import configure as write_flag

    value = _flag(mode, rewrite, verify, ignore)
    try:
        written = write_flag(value, config_file)
    except ValueError as error:
        raise _failure(str(error)) from None
    Console().print(f"accum_plugin: {value}, in {written}", soft_wrap=True, markup=False)


@app.command()
def report(
    logdir: Annotated[Path, typer.Argument(help="A run's logging directory, or one above several runs.")],
    output: Annotated[Path | None, typer.Option(help="The PNG to write; LOGDIR/accum_report.png if left out.")] = None,
) -> None:
    """Plot the accum/* metrics of one or more runs and list their findings."""
    from accum_plugin.report import ReportError, draw, read_runs, tables

    console = Console()
    try:
        runs = read_runs(logdir)
        for table in tables(runs):
            console.print(table)
        path = draw(runs, output or logdir / "accum_report.png")
    except ReportError as error:
        raise _failure(str(error)) from None
    console.print(f"Plots written to {path}", soft_wrap=True)


def main() -> None:
    """Run the command line."""
    app()


def _progress(console: Console, status: Any, text: str) -> None:
    """Show a moving line in a terminal, and plain lines where the output goes to a file."""
    if console.is_terminal:
        status.update(text)
    else:
        console.print(f"... {text}", soft_wrap=True)


def _flag(mode: str, rewrite: str | None, verify: bool, ignore: list[str] | None) -> str | dict[str, Any]:
    """Return the shortest value that says it: a mode alone, or a mapping."""
    more = {"rewrite": rewrite, "verify": verify or None, "ignore": ignore or None}
    given = {key: value for key, value in more.items() if value is not None}
    return {"mode": mode, **given} if given else mode


def _failure(message: str) -> typer.Exit:
    """Print the error and return the exit to raise."""
    Console(stderr=True).print(Text.assemble(("error: ", "red"), message), soft_wrap=True)
    return typer.Exit(1)


if __name__ == "__main__":
    main()
