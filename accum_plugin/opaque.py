"""Losses that hide how they are reduced: opened by running them once more, eagerly, or told by the split probe."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from accum_plugin.controlled import open_compiled
from accum_plugin.loss_graph import LossReading, Scale, Term, read_loss
from accum_plugin.probe import split_probe
from accum_plugin.untouched import one_process, undisturbed


@dataclasses.dataclass(frozen=True)
class Opened:
    """What was learned about a loss that the graph does not show.

    Args:
        kind: ``"mean"``, ``"sum"`` or ``"coupled"``; ``"unknown"`` where nothing could tell.
        units_per_example: Units in one example of the batch that was looked at.
        scales: Scalars inside the opaque part and around it, the framework's own left out; ``None`` where only values
            were seen.
        size: Relative size of the difference a probe measured, for a coupled loss.
        evidence: ``"graph"`` or ``"probe"``.
        reason: In words.
        batch_statistics: Whether BatchNorm is what couples the examples.
    """

    kind: str
    units_per_example: float = 1.0
    scales: tuple[Scale, ...] | None = None
    size: float | None = None
    evidence: str = "probe"
    reason: str = ""
    batch_statistics: bool = False


def open_loss(loss_fn: Callable[[Any], Any], batch: Any, num_examples: float, modules: list[nn.Module]) -> Opened:
    """Find out how a loss is reduced by running it again on the same batch, leaving no trace.

    Args:
        loss_fn: The loss of a batch, as the framework's step computes it.
        batch: The microbatch at hand.
        num_examples: Examples in it.
        modules: Everything that ``loss_fn`` runs.
    """
    reading = _eager_reading(loss_fn, batch, modules)
    data = [term for term in reading.terms if term.kind in ("mean", "sum", "coupled")]
    if len(data) == 1 and data[0].units:
        term = data[0]
        units = term.units[0]
        count = float(units.tolist()) if isinstance(units, Tensor) else float(units)
        return Opened(term.kind, count / num_examples, term.scales, evidence="graph", reason=f"run eagerly it is {term.reduction}")
    verdict = split_probe(loss_fn, batch, modules=modules)
    return Opened(verdict.kind, size=verdict.residual, reason=verdict.reason, batch_statistics=verdict.batch_statistics)


def _eager_reading(loss_fn: Callable[[Any], Any], batch: Any, modules: list[nn.Module]) -> LossReading:
    try:
        with undisturbed(modules), one_process(), torch.enable_grad(), open_compiled():
            loss = loss_fn(batch)
            return read_loss(loss) if isinstance(loss, Tensor) else LossReading((), "it returned no tensor")
    except Exception as error:  # the user's own code, run once more
        return LossReading((), f"it could not be run again: {error!r}")


def resolve(opaque: Term, opened: Opened, num_examples: float, framework_divisor: int) -> Term | None:
    """Turn the opaque term of one microbatch into one that the ledger can take; ``None`` where nothing is known."""
    if opened.kind not in ("mean", "sum"):
        return None
    scales = opaque.scales
    if opened.scales is not None:  # read eagerly: everything but the framework's own division
        own = [Scale(framework_divisor, True, True)] if framework_divisor > 1 else []
        scales = (*own, *opened.scales)
    return dataclasses.replace(opaque, kind=opened.kind, units=(opened.units_per_example * num_examples,), scales=scales)
