"""ACC209: a schedule's length against the number of times it advances."""

from __future__ import annotations

import dataclasses

from accum_plugin.finding import Certainty, Evidence, Finding
from accum_plugin.neighbors.horizon import Horizon
from accum_plugin.rules.boundary import SchedulerHorizon


@dataclasses.dataclass(frozen=True)
class Run:
    """The length of a training, planned or measured.

    Args:
        optimizer_steps: Optimizer steps.
        microbatches: Microbatches on one rank.
        epochs: Passes over the data, where known.
        num_ranks: Data-parallel ranks, ``n``.
        evidence: Whether it was planned (``"configuration"``) or measured.
    """

    optimizer_steps: int
    microbatches: int
    epochs: int | None
    num_ranks: int
    evidence: Evidence = "configuration"

    def slack(self, length: int) -> int:
        """How far a length may be off for rounding: by one in every epoch, where that is little."""
        rounding = self.epochs or 1
        return rounding if rounding <= length / 10 else 0


def judge_length(horizon: Horizon, advances: int, pace: str, run: Run) -> Finding | None:
    """Compare a schedule's length with what it will have advanced when training ends.

    Only a length that is the training's length in another unit is a mistake: a schedule may be meant to be cut off.

    Args:
        horizon: The schedule's length.
        advances: Times it advances in the whole training.
        pace: How it advances, in words (``"once per optimizer step"``, ``"once per epoch"``).
        run: The training.

    Example:
        >>> run = Run(optimizer_steps=250, microbatches=1000, epochs=1, num_ranks=1)
        >>> finding = judge_length(Horizon(1000, "CosineAnnealingLR(T_max=1000)"), 250, "once per optimizer step", run)
        >>> finding.certainty, finding.hint
        ('certain', 'Set it to 250.')
    """
    length = horizon.length
    if length is None or length == advances:
        return _endless_warmup(horizon, advances, pace, run)
    apart = abs(length - advances)
    matches = [
        (abs(length - value), name)
        for name, value in _units(run).items()
        if value != advances and abs(length - value) <= run.slack(value) and abs(length - value) < apart
    ]
    if not matches:
        return _endless_warmup(horizon, advances, pace, run)
    return _mismatch(horizon, advances, pace, min(matches)[1], run)


def _units(run: Run) -> dict[str, int]:
    units = {
        "optimizer steps": run.optimizer_steps,
        "microbatches": run.microbatches,
        "microbatches of all ranks": run.microbatches * run.num_ranks,
        "optimizer steps times ranks": run.optimizer_steps * run.num_ranks,
    }
    if run.optimizer_steps % run.num_ranks == 0:
        units["optimizer steps of one rank's share of the data"] = run.optimizer_steps // run.num_ranks
    if run.epochs is not None:
        units["epochs"] = run.epochs
    return units


def _mismatch(horizon: Horizon, advances: int, pace: str, counted: str, run: Run) -> Finding:
    length = horizon.length or 0
    by = f"{length / advances:.3g} times too long" if length > advances else f"{advances / length:.3g} times too short"
    seen = (
        f"{horizon.setting} is {length} long, which is the training's length in {counted}; "
        f"the scheduler advances {pace}, {advances} times in all: it is {by}."
    )
    # a long schedule may be one that was interrupted, and a count of epochs may be a cycle
    known = run.evidence == "configuration" or length < advances
    certainty: Certainty = "certain" if known and counted != "epochs" else "suspected"
    return SchedulerHorizon.finding(
        seen, certainty=certainty, evidence=run.evidence, remedy=_remedy(advances, pace, run), cause=horizon.setting
    )


def _endless_warmup(horizon: Horizon, advances: int, pace: str, run: Run) -> Finding | None:
    if horizon.warmup <= advances or run.evidence != "configuration":
        return None
    seen = (
        f"the warm-up of {horizon.setting} takes {horizon.warmup} steps; the scheduler advances {pace}, "
        f"{advances} times in all: the warm-up never ends."
    )
    return SchedulerHorizon.finding(
        seen,
        certainty="suspected",
        evidence=run.evidence,
        remedy=_remedy(advances, pace, run, "Keep it well below"),
        cause=horizon.setting,
    )


def _remedy(advances: int, pace: str, run: Run, verb: str = "Set it to") -> str:
    if pace == "once per epoch":
        steps = f'{run.optimizer_steps} and step the scheduler with interval="step"'
        return f"{verb} {steps}, or {verb.lower()} {advances}."
    return f"{verb} {advances}."
