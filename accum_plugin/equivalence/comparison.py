"""Two gradients compared: the best-fit factor, its name, the cosine, the worst parameter, and a report in words."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Gradients = Sequence["Tensor | None"]
#: How many times the measured effect of rounding a deviation may be.
SAFETY = 3.0
#: A tolerance above this one cannot tell right from wrong.
INCONCLUSIVE = 0.2


@dataclasses.dataclass(frozen=True)
class EquivalenceReport:
    """Outcome of :func:`~accum_plugin.equivalence.check_equivalence`; the same on every rank.

    Args:
        equivalent: Whether the two gradients agree within ``tolerance``; ``None`` where that could not be told.
        factor: The number that best turns the reference into the real gradient (least squares).
        factor_name: ``factor`` as a ratio of ``n`` (ranks), ``K`` (accumulation steps) and ``m`` (microbatches in
            this window) where it is one and nothing else is wrong; else empty.
        cosine: Cosine of the angle between the two gradients, over all parameters.
        deviation: Norm of the difference over the norm of the reference.
        worst_parameter: The parameter whose gradient deviates most.
        worst_deviation: Its own relative deviation.
        tolerance: The relative deviation that arithmetic explains.
        tolerance_source: Where ``tolerance`` comes from.
        examples: Examples in the window, over all ranks.
        ranks: Data-parallel ranks, ``n``.
        microbatches: Microbatches of the window on a rank, ``m`` (the most where ranks differ).
        weight_spread: Largest over smallest weight of a microbatch, relative to the weight it should have, where
            the two gradients differ by the microbatches' weights only.
        coupled: Whether examples influence each other across the batch, so that no weights restore the reference.
        batch_statistics: Whether BatchNorm layers are what couples them.
        reason: Why the gradients differ, or why it could not be told, as far as it is known.
    """

    equivalent: bool | None = None
    factor: float = math.nan
    factor_name: str = ""
    cosine: float = math.nan
    deviation: float = math.nan
    worst_parameter: str = ""
    worst_deviation: float = math.nan
    tolerance: float = math.nan
    tolerance_source: str = ""
    examples: int = 0
    ranks: int = 1
    microbatches: int = 0
    weight_spread: float | None = None
    coupled: bool = False
    batch_statistics: bool = False
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON-serialisable data; a number that is not finite becomes ``None``."""
        data = dataclasses.asdict(self)
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in data.items()
        }

    def __str__(self) -> str:
        """Say the outcome in plain words."""
        if self.equivalent is None:
            return f"Not told whether the gradient equals the one-process gradient: {self.reason}."
        window = f"{_count(self.microbatches, 'microbatch')} on {_count(self.ranks, 'rank')}"
        against = f"one batch of {_count(self.examples, 'example')} on one process"
        limit = f"tolerance {self.tolerance:.1e}, {self.tolerance_source}"
        if self.equivalent:
            return f"Equivalent: {window} give the gradient of {against} (off by {self.deviation:.1e}; {limit})."
        name = f" = {self.factor_name}" if self.factor_name else ""
        return (
            f"Not equivalent: {window} against {against}: best-fit factor {self.factor:.6g}{name}, cosine "
            f"{self.cosine:.6f}, worst parameter {self.worst_parameter} (off by {self.worst_deviation:.2g}; {limit})."
            + (f" {self.reason[0].upper()}{self.reason[1:]}." if self.reason else "")
        )


@dataclasses.dataclass(frozen=True)
class Reference:
    """The one-process gradient and what rounding or random layers do to it.

    Args:
        gradients: One per parameter; ``None`` where there is none.
        noise: Norm of the measured deviation, per parameter.
        floor: Relative error that the lengths of the sums explain.
        statistical: Whether ``noise`` is that of random layers: only the whole gradient is judged then.
    """

    gradients: Gradients
    noise: Sequence[float]
    floor: float
    statistical: bool = False

    @property
    def norm(self) -> float:
        """Norm over all parameters."""
        return math.sqrt(sum(norm_squared(grad) for grad in self.gradients))

    @property
    def tolerance(self) -> float:
        """Relative deviation of the whole gradient that arithmetic explains."""
        norm = self.norm
        return self.floor + (SAFETY * math.hypot(*self.noise) / norm if norm else 0.0)


def compare(
    real: Gradients, reference: Reference, names: Sequence[str], tolerance: float | None = None
) -> dict[str, Any]:
    """Compare the real gradient with the reference, in float64.

    Args:
        real: The real run's gradients, one per parameter.
        reference: The one-process gradient.
        names: The parameters' names.
        tolerance: The user's own relative tolerance; ``None`` takes the measured one.

    Returns:
        ``equivalent``, ``factor``, ``cosine``, ``deviation``, ``worst_parameter``, ``worst_deviation``,
        ``tolerance`` and ``is_scalar`` (whether one factor explains all of the difference).
    """
    limit = reference.tolerance if tolerance is None else tolerance
    norm = reference.norm
    dot = real_squared = difference = 0.0
    worst = (-1.0, "", math.nan)
    for name, mine, meant, noise in zip(names, real, reference.gradients, reference.noise):
        real_squared += norm_squared(mine)
        dot += _dot(mine, meant)
        off, size = distance(mine, meant), math.sqrt(norm_squared(meant))
        difference += off**2
        allowed = limit * size if tolerance is not None else SAFETY * noise + reference.floor * size
        allowed += torch.finfo(torch.float64).tiny + (norm * reference.floor * 1e-3 if tolerance is None else 0.0)
        worst = max(worst, (off / allowed, name, off / (size or norm or 1.0)))
    factor = dot / norm**2 if norm else (math.inf if real_squared else 1.0)
    cosine = dot / (norm * math.sqrt(real_squared)) if norm and real_squared else math.nan
    deviation = math.sqrt(difference) / norm if norm else (math.inf if difference else 0.0)
    rest = math.sqrt(max(0.0, real_squared - factor * dot)) if norm else math.inf
    return {
        "equivalent": deviation <= limit and (reference.statistical or worst[0] <= 1.0),
        "factor": factor,
        "cosine": cosine,
        "deviation": deviation,
        "worst_parameter": worst[1],
        "worst_deviation": worst[2],
        "tolerance": limit,
        "is_scalar": rest <= max(limit, 1e-7) * abs(factor) * norm,
    }


def name_factor(factor: float, *, ranks: int, steps: int, microbatches: int, tolerance: float) -> str:
    """Name ``factor`` as a ratio of ``n``, ``K`` and ``m``, or return an empty string.

    Of the names that fit, the simplest are given; two that cannot be told apart (``n`` equal to ``K``) both.

    Example:
        >>> name_factor(0.5, ranks=2, steps=3, microbatches=3, tolerance=1e-6)
        '1/n'
    """
    for tier in _ratios(ranks, steps, microbatches):
        fits = [name for name, value in tier.items() if value != 1.0 and abs(factor / value - 1.0) <= tolerance]
        if fits:
            return " or ".join(fits)
    return ""


def _ratios(n: int, k: int, m: int) -> Iterator[dict[str, float]]:
    """Yield names and values, simplest first."""
    yield {"n": n, "1/n": 1 / n, "K": k, "1/K": 1 / k, **({"m/K": m / k, "m": m, "1/m": 1 / m} if m != k else {})}
    if n == 1 or k == 1:
        return
    yield {"n*K": n * k, "1/(n*K)": 1 / (n * k), "n/K": n / k, "K/n": k / n}
    if m != k:
        yield {"n*m/K": n * m / k, "m/(n*K)": m / (n * k), "n*m": n * m, "m/n": m / n, "n/m": n / m}


def norm_squared(grad: Tensor | None) -> float:
    """Return the sum of squares of a gradient, 0 where there is none."""
    return 0.0 if grad is None else float(flat(grad).square().sum())


def distance(one: Tensor | None, other: Tensor | None) -> float:
    """Return the norm of the difference of two gradients; one that is not there is zero."""
    if one is None or other is None:
        return math.sqrt(norm_squared(one) + norm_squared(other))
    return float((flat(one) - flat(other)).norm())


def flat(grad: Tensor) -> Tensor:
    """Return a gradient as one dense float64 vector."""
    dense = grad if grad.layout is torch.strided else grad.to_dense()
    device = "cpu" if dense.device.type == "mps" else dense.device  # MPS has no float64
    return dense.detach().reshape(-1).to(device, torch.float64)


def _dot(one: Tensor | None, other: Tensor | None) -> float:
    return 0.0 if one is None or other is None else float(flat(one) @ flat(other))


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{number} {noun if number == 1 else plural}"
