"""What happened to the gradient between backward and step, from a few elements: a ratio, or something worse."""

from __future__ import annotations

import dataclasses
import math

from accum_plugin.normalization import TOLERANCE


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The followed elements of ``.grad`` against the sum of all ranks' contributions.

    Args:
        ratio: Best fit of ``.grad = ratio * contributions``; ``None`` where nothing contributed.
        scalar: Whether one number explains all elements, to rounding.
        agree: Whether all ranks hold the same gradient.
        precision: Relative uncertainty of the ratio, from the gradient's dtype and cancellation.
    """

    ratio: float | None
    scalar: bool
    agree: bool
    precision: float

    def snap(self, candidates: list[float]) -> float | None:
        """The candidate that the ratio is equal to, within its precision."""
        if self.ratio is None or not self.scalar:
            return None
        return next(
            (c for c in candidates if math.isclose(self.ratio, c, rel_tol=max(TOLERANCE, self.precision))), None
        )


def measure(
    contributions: list[float],
    grad_sums: list[float],
    square_sum: float,
    magnitude: float,
    num_ranks: float,
    epsilon: float,
) -> Measurement:
    """Compare gradients with contributions.

    Args:
        contributions: Each followed element's contributions, added up over microbatches and ranks.
        grad_sums: Each followed element of ``.grad``, added up over ranks.
        square_sum: Squares of the followed elements, added up over elements and ranks.
        magnitude: Sizes of all contributions, added up: what rounding errors are relative to.
        num_ranks: Ranks that were added up.
        epsilon: Rounding unit of the gradients, or of a compressing communication hook.
    """
    mean = [value / num_ranks for value in grad_sums]
    mean_square = sum(value * value for value in mean)
    spread = square_sum / num_ranks - mean_square
    noise = 8 * epsilon
    agree = not spread > max(noise * noise, 1e-13) * square_sum / num_ranks
    power = sum(c * c for c in contributions)
    if not power or not math.isfinite(power) or not math.isfinite(mean_square):
        return Measurement(None, True, agree, math.inf)
    ratio = sum(g * c for g, c in zip(mean, contributions)) / power
    precision = noise * magnitude / math.sqrt(power)
    residual = math.sqrt(sum((g - ratio * c) ** 2 for g, c in zip(mean, contributions)))
    scalar = residual <= precision * math.sqrt(mean_square) + 1e-300
    if precision > 0.1:  # the contributions cancel: the elements say nothing
        return Measurement(None, True, agree, precision)
    return Measurement(ratio, scalar, agree, precision)
