"""Metrics and findings into the experiment logs."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accum_plugin.finding import Finding
from accum_plugin.metrics import WindowMetrics
from accum_plugin.record import WindowRecord

if TYPE_CHECKING:
    from lightning.pytorch import Trainer  # an Accelerate loop need not wait for its import


MLFLOW_TAG_LENGTH = 5000  # characters that MLflow stores of a tag
NOT_THE_USERS = ("accum_plugin", "accelerate", "contextlib", "functools", "lightning", "torch", "transformers", "trl")


class AccumulationWarning(UserWarning):
    """A finding, as a Python warning."""


def warn_user(message: str) -> None:
    """Warn at the line of the user's own code that led here; where warnings are errors, log instead."""
    frame, level = sys._getframe(1), 2
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in NOT_THE_USERS:
        frame, level = frame.f_back, level + 1
    try:
        warnings.warn(message, AccumulationWarning, stacklevel=level if frame is not None else 2)
    except AccumulationWarning:  # only mode="raise" may stop a run
        logging.getLogger("accum_plugin").warning(message)


def append_finding(directory: str | Path, finding: Finding) -> None:
    """Append a finding to ``findings.jsonl`` in ``directory``, which is made if need be."""
    path = Path(directory) / "findings.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(finding.to_dict()) + "\n")


class LightningLog:
    """Writes to a Trainer's loggers, on rank zero.

    Args:
        trainer: The Trainer whose loggers to use.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._metrics = WindowMetrics()

    def metrics(self, record: WindowRecord) -> None:
        """Send a window's numbers to every logger, at the step Lightning logs its own metrics."""
        if not self._trainer.loggers:
            return
        self._metrics.update(record)
        values = self._metrics.compute()
        step = self._trainer.fit_loop.epoch_loop._batches_that_stepped
        for logger in self._trainer.loggers:
            logger.log_metrics(values, step=step)

    def finding(self, finding: Finding) -> None:
        """Warn once and write the finding where the logger takes text, else beside its metrics."""
        if not self._trainer.is_global_zero:
            return
        if finding.certainty != "info":
            warn_user(finding.message)
        for logger in self._trainer.loggers:
            self._write(logger, finding)

    def _write(self, logger: Any, finding: Finding) -> None:
        add_text = getattr(logger.experiment, "add_text", None)
        if add_text is not None:
            add_text(f"accum/{finding.code}", finding.message, self._trainer.global_step)
        directory = getattr(logger, "log_dir", None) or getattr(logger, "save_dir", None)
        if directory is not None:
            append_finding(directory, finding)


class AccelerateLog:
    """Writes to an Accelerator's trackers, on the main process.

    Args:
        accelerator: The Accelerator whose trackers to use.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._metrics = WindowMetrics()
        self._step = 0
        self._held: dict[str, float] = {}  # numbers that wait for the row they belong in

    def metrics(self, record: WindowRecord) -> None:
        """Send a window's numbers to every initialized tracker; to W&B with the loop's own next row."""
        self.join_row()
        self._step = record.optimizer_step
        trackers = self._accelerator.trackers
        if not trackers:
            return
        self._metrics.update(record)
        values = self._metrics.compute()
        for tracker in trackers:
            if tracker.name == "wandb":
                self._held = values
            else:
                tracker.log(values, step=self._step)

    def join_row(self, values: Any = None, step: int | None = None, log_kwargs: Any = None) -> None:
        """The loop logs a row of its own: put the numbers that wait for it into that row.

        W&B has one counter for all rows and drops each that comes later with a lower step, so the plugin must not count
        steps of its own there. Without arguments the numbers wait no longer: W&B keeps them for the row that is next.
        """
        held, self._held = self._held, {}
        for tracker in self._accelerator.trackers if held else ():
            if tracker.name == "wandb":
                tracker.log(held, step=step, commit=False)

    def warn(self, finding: Finding) -> None:
        """Warn once, on the main process, unless the finding is only worth knowing."""
        if self._accelerator.is_main_process and finding.certainty != "info":
            warn_user(finding.message)

    def finding(self, finding: Finding) -> None:
        """Warn, and write the finding into every tracker that takes text, else into the logging directory."""
        self.warn(finding)
        if not self._accelerator.is_main_process:
            return
        trackers = self._accelerator.trackers
        written = [write_text(tracker.name, tracker.tracker, finding, self._step) for tracker in trackers]
        directory = getattr(self._accelerator, "logging_dir", None)
        if directory is not None and not any(written):
            append_finding(directory, finding)


def write_text(name: str, target: Any, finding: Finding, step: int) -> bool:
    """Write a finding where a tracker takes text: TensorBoard text, W&B and Trackio alerts, MLflow tags.

    Args:
        name: The tracker, as accelerate and transformers call it.
        target: Its writer, run or module; ``None`` where it has none yet.
        finding: What to write.
        step: Optimizer step to file it under.

    Returns:
        Whether the tracker took it.
    """
    if target is None:
        return False
    title = f"{finding.code} {finding.name}"
    if name == "tensorboard" and hasattr(target, "add_text"):
        target.add_text(f"accum/{finding.code}", finding.message, step)
    elif name in ("wandb", "trackio") and hasattr(target, "alert"):
        target.alert(title=title, text=finding.message)
    elif name == "mlflow":
        import mlflow

        mlflow.set_tag(f"accum/{finding.code}", finding.message[:MLFLOW_TAG_LENGTH])
    else:
        return False
    return True
