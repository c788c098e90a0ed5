"""Why a window's gradient differs from the full batch's by more than a factor: weights, or examples that interact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from accum_plugin.equivalence.comparison import Reference
from accum_plugin.equivalence.controlled import batch_statistics_layers, freeze_batch_statistics
from accum_plugin.equivalence.reference import OneProcess

#: Times the tolerance by which the full gradient may miss every weighted sum of the microbatches' gradients.
_SLACK = 10.0


def explain(one: OneProcess, real: Sequence[Tensor | None], meant: Reference) -> dict[str, Any]:
    """Tell unequal weights of microbatches from examples that influence each other.

    Where the loss is any kind of mean or sum, the full batch's gradient is a weighted sum of the microbatches' own
    gradients, and the weights follow by least squares; where examples are compared with each other (or normalized
    together by BatchNorm) no weights give it. Judged on a sample of gradient elements.

    Returns:
        ``weight_spread``, ``coupled``, ``batch_statistics`` and ``reason``, as in
        :class:`~accum_plugin.equivalence.comparison.EquivalenceReport`.
    """
    full, tolerance = one.sketch(meant.gradients), _SLACK * meant.tolerance
    columns = _columns(one)
    missed = _missed(columns, full)
    if missed > tolerance:
        return _coupled(one, missed, tolerance)
    spread = _spread(columns, one.sketch(real), full, tolerance)
    if spread is None:
        return {}
    return {"weight_spread": spread, "reason": f"microbatches weigh differently, by up to {spread:.4g} to 1"}


def _coupled(one: OneProcess, missed: float, tolerance: float) -> dict[str, Any]:
    layers = batch_statistics_layers([one.model])
    freeze_batch_statistics([one.model])
    cause = bool(layers) and _missed(_columns(one), one.sketch(one.gradients())) <= tolerance
    if cause:
        reason = f"BatchNorm ({len(layers)} in training mode) normalizes each microbatch by itself"
    else:
        reason = "the loss compares the examples of a batch with each other"
    reason += f": no weighting of the microbatches gives the full batch's gradient ({missed:.2g} remain)"
    return {"coupled": True, "batch_statistics": cause, "reason": reason}


def _columns(one: OneProcess) -> Tensor:
    """Return the microbatches' own gradients, one a column (elements x microbatches)."""
    return torch.stack([one.sketch_of_part(index) for index in range(len(one.parts))], dim=1)


def _missed(columns: Tensor, vector: Tensor) -> float:
    """Return the share of ``vector`` that no weighted sum of ``columns`` gives."""
    rest = vector - columns @ _weights(columns, vector)
    return float(rest.norm() / vector.norm().clamp_min(torch.finfo(torch.float64).tiny))


def _weights(columns: Tensor, vector: Tensor) -> Tensor:
    return torch.linalg.lstsq(columns, vector[:, None], driver="gelsd").solution[:, 0]


def _spread(columns: Tensor, real: Tensor, full: Tensor, tolerance: float) -> float | None:
    """Return largest over smallest weight, seen over meant; ``None`` where the weights are not determined."""
    sizes = torch.linalg.svdvals(columns)
    if len(sizes) < columns.size(1) or float(sizes[-1]) < tolerance * float(sizes[0]):
        return None
    if _missed(columns, real) > tolerance:
        return None
    ratio = _weights(columns, real) / _weights(columns, full)
    return float(ratio.max() / ratio.min()) if bool((ratio > 0).all()) else None
