"""The demo's measurements as terminal tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table
from rich.text import Text

_LOSSES = {"global": "global mean", "local": "local mean"}
_FOUND = "found and corrected"


def demo_tables(result: dict[str, Any]) -> Iterator[Table]:
    """Yield one table per section of :func:`accum_plugin.demo.run_demo`'s measurements."""
    yield _reduction_table(result)
    yield _window_table(result["incomplete_window"])
    yield _token_table(result["ragged_tokens"])


def _reduction_table(result: dict[str, Any]) -> Table:
    n, norm = result["ranks"], result["rows"][0]["without"]["reference_norm"]
    table = Table(
        title=f"Digits, {n} {'rank' if n == 1 else 'ranks'}: gradient applied / one-process gradient, without and with",
        caption=f"global mean: sum / global batch; one-process gradient: factor 1, norm {norm:.6f}",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("loss")
    table.add_column("reduction")
    for heading in ("without", "with"):
        table.add_column(heading, justify="right")
    table.add_column(_FOUND, min_width=27)
    for row in result["rows"]:
        cells = (_factor(row["factor_without"]), _factor(row["factor_with"]), _codes(row))
        table.add_row(_LOSSES[row["loss"]], row["reduction"], *cells)
    return table


def _window_table(section: dict[str, Any]) -> Table:
    kept, full = section["microbatches"], section["accumulation"]
    table = Table(title=f"The epoch's last window: {kept} microbatches where {full} were due", title_justify="left")
    for heading in ("", "factor", "deviation"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_column(_FOUND, min_width=27)
    _pair(table, section, ("factor", "deviation"))
    return table


def _token_table(section: dict[str, Any]) -> Table:
    table = Table(
        title="Source text, local token means over ragged sequences (not one factor)",
        title_justify="left",
    )
    for heading in ("", "factor", "cosine", "deviation"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_column(_FOUND, min_width=27)
    _pair(table, section, ("factor", "cosine", "deviation"))
    return table


def _pair(table: Table, section: dict[str, Any], keys: tuple[str, ...]) -> None:
    """Add the row without and the row with the plugin."""
    for label in ("without", "with"):
        numbers = [_number(name, section[label][name]) for name in keys]
        table.add_row(label, *numbers, _codes(section) if label == "with" else "")


def _number(name: str, value: float) -> Text | str:
    if name == "factor":
        return _factor(value)
    return f"{value:.6f}" if name == "cosine" else f"{value:.1e}"


def _factor(value: float) -> Text:
    return Text(f"{value:.6f}", style="green" if abs(value - 1) < 1e-6 else "bold red")


def _codes(section: dict[str, Any]) -> str:
    lines = []
    for finding in section["findings"]:
        note = "" if finding["action"] == "corrected" else f" ({finding['action']})"
        lines.append(f"{finding['code']} {finding['name']}{note}")
    return "\n".join(dict.fromkeys(lines)) or "-"
