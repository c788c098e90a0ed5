"""Read the plugin's metrics and findings back from a logging directory, as tables and plots."""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

PREFIX = "accum/"
FINDINGS = "findings.jsonl"

Series = list[tuple[int, float]]


class ReportError(RuntimeError):
    """There is nothing to report, or something is missing; the message says what to do."""


@dataclasses.dataclass
class Run:
    """What one directory logged.

    Args:
        name: The directory, relative to the one asked for.
        series: Metric key to its (step, value) pairs.
        findings: One mapping per finding, as :meth:`accum_plugin.Finding.to_dict` gives it.
    """

    name: str
    series: dict[str, Series] = dataclasses.field(default_factory=dict)
    findings: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def read_runs(logdir: Path) -> list[Run]:
    """Find the runs at and below ``logdir``: CSVLogger's ``metrics.csv``, TensorBoard's event files.

    Raises:
        ReportError: If the directory does not exist or nothing below it holds the plugin's metrics.
    """
    if not logdir.is_dir():
        raise ReportError(f"{logdir} is not a directory; give the logging directory of a run")
    files = [*logdir.rglob("metrics.csv"), *logdir.rglob("events.out.tfevents.*"), *logdir.rglob(FINDINGS)]
    folders = sorted({file.parent for file in files})
    runs = [_read_run(folder, str(folder.relative_to(logdir))) for folder in folders]
    runs = [run for run in runs if run.series or run.findings]
    if not runs:
        raise ReportError(
            f"no {PREFIX}* metrics and no {FINDINGS} at or below {logdir}; train with AccumulationCallback() and "
            "a CSVLogger or TensorBoardLogger, then give that logger's directory"
        )
    return runs


def _read_run(folder: Path, name: str) -> Run:
    run = Run(name)
    if (folder / "metrics.csv").is_file():
        run.series.update(_read_csv(folder / "metrics.csv"))
    if any(folder.glob("events.out.tfevents.*")):
        run.series.update(_read_events(folder))
    if (folder / FINDINGS).is_file():
        lines = (folder / FINDINGS).read_text().splitlines()
        run.findings = [json.loads(line) for line in lines if line.strip()]
    return run


def _read_csv(path: Path) -> dict[str, Series]:
    series: dict[str, Series] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            for key, value in row.items():
                if key.startswith(PREFIX) and value:
                    series.setdefault(key, []).append((int(row["step"]), float(value)))
    return series


def _read_events(folder: Path) -> dict[str, Series]:
    if importlib.util.find_spec("tensorboard") is None:
        raise ReportError("reading TensorBoard's event files needs it: pip install 'accum-plugin[plots]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    keys = [key for key in events.Tags()["scalars"] if key.startswith(PREFIX)]
    return {key: [(event.step, event.value) for event in events.Scalars(key)] for key in keys}


def tables(runs: list[Run]) -> Iterator[Table]:
    """Yield, for every run, a table of its metrics and one of its findings."""
    for run in runs:
        if run.series:
            yield _metric_table(run)
        if run.findings:
            yield _finding_table(run)


def _metric_table(run: Run) -> Table:
    table = Table(title=f"{run.name}: metrics", title_justify="left")
    table.add_column("metric")
    for heading in ("logged", "first", "smallest", "largest", "last"):
        table.add_column(heading, justify="right")
    for key, points in sorted(run.series.items()):
        values = [value for _, value in points]
        shown = (values[0], min(values), max(values), values[-1])
        table.add_row(key, str(len(values)), *(f"{value:.6g}" for value in shown))
    return table


def _finding_table(run: Run) -> Table:
    table = Table(title=f"{run.name}: findings", title_justify="left")
    for heading in ("code", "name", "factor", "certainty", "evidence", "action", "first step"):
        table.add_column(heading)
    for item in run.findings:
        factor = "" if item["factor"] is None else f"{item['factor']:.6g}"
        rest = (item[key] for key in ("certainty", "evidence", "action"))
        table.add_row(item["code"], item["name"], factor, *rest, str(item["optimizer_step"]))
    return table


def draw(runs: list[Run], path: Path) -> Path:
    """Plot every metric over the steps, one panel a metric and one line a run, and return the PNG's path.

    Raises:
        ReportError: If matplotlib is missing, or the runs hold findings but no metrics.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ReportError("plots need matplotlib: pip install 'accum-plugin[plots]'")
    keys = sorted({key for run in runs for key in run.series})
    if not keys:
        raise ReportError(f"the runs hold findings but no {PREFIX}* metrics, so there is nothing to plot")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 2.6 * ((len(keys) + 2) // 3)), layout="constrained")
    panels = figure.subplots((len(keys) + 2) // 3, 3, squeeze=False).flat
    for panel, key in zip(panels, keys, strict=False):
        _draw_panel(panel, key, runs)
    for panel in list(panels):  # what zip left over
        panel.set_axis_off()
    figure.savefig(path, dpi=120)
    return path


def _draw_panel(panel: Any, key: str, runs: list[Run]) -> None:
    for run in runs:
        if key in run.series:
            steps, values = zip(*run.series[key], strict=True)
            panel.plot(steps, values, marker=".", label=run.name)
    panel.set_title(key, fontsize=9)
    panel.set_xlabel("step", fontsize=8)
    panel.tick_params(labelsize=8)
    if len(runs) > 1:
        panel.legend(fontsize=7)
