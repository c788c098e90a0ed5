"""ACC301: layers whose statistics see the microbatch instead of the effective batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from accum_plugin.finding import Finding
from accum_plugin.neighbors.base import Neighbor
from accum_plugin.rules.objective import BatchStatistics

if TYPE_CHECKING:
    from accum_plugin.session import Session
    from accum_plugin.window import OptimizerWindow

LOOKED_AT = 3  # windows: by then the run has shown how long a window is


class Statistics(Neighbor):
    """Looks once for batch normalization in training mode."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._done = False

    def stepping(self, window: OptimizerWindow) -> None:
        """Look through the modules, in the first windows, until one accumulates or is data-parallel."""
        if self._done or window.steps_taken >= LOOKED_AT:
            return
        ranks, microbatches = self.session.reduction.num_ranks, max(window.microbatches, self.host.steps())
        if ranks * microbatches == 1:
            return
        self._done = True
        if self.session.log.ignores(BatchStatistics.code):
            return
        finding = batch_statistics(
            self.host.modules(), microbatches, ranks, self.session.num_examples, self.session.difference
        )
        if finding is not None:
            self.report(finding)


def batch_statistics(
    models: Iterable[nn.Module],
    microbatches: int,
    num_ranks: int,
    num_examples: float | None = None,
    difference: Callable[[], str] = str,
) -> Finding | None:
    """Find layers in training mode that normalize with the microbatch's own mean and variance.

    Args:
        models: What is trained.
        microbatches: Microbatches in a window.
        num_ranks: Data-parallel ranks.
        num_examples: Examples in a microbatch, where known.
        difference: Measures what the layers do to the loss, and says it in words; called where there are any.
    """
    layers_of = [(name, layer) for model in models for name, layer in model.named_modules()]
    named = [(name, layer) for name, layer in layers_of if _sees_batch(layer, microbatches)]
    if not named:
        return None
    name, layer = named[0]
    layers = f"{len(named)} layers normalize" if len(named) > 1 else "1 layer normalizes"
    size = "the microbatch" if num_examples is None else f"the {num_examples:g} examples of a microbatch"
    where = f"first {name!r}, {type(layer).__name__}" if len(named) > 1 else f"{name!r}, {type(layer).__name__}"
    whole = f"the {microbatches} x {num_ranks} microbatches of the effective batch"
    seen = f"{layers} over {size}, not over {whole} ({where}).{difference()}"
    return BatchStatistics.finding(seen, certainty="info", evidence="configuration")


def _sees_batch(layer: nn.Module, microbatches: int) -> bool:
    if not isinstance(layer, _BatchNorm) or not layer.training:
        return False
    return microbatches > 1 or not isinstance(layer, nn.SyncBatchNorm)
