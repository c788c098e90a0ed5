"""What one accumulation window was: the numbers that go into the experiment log."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class WindowRecord:
    """One optimizer step, in the numbers that say whether it was the step that was meant.

    Args:
        optimizer_step: Index of the optimizer step, 0 for the first; skipped steps do not count.
        microbatches: Microbatches in the window, per data-parallel rank (rounded where ranks differ).
        effective_batch: Examples over all microbatches and data-parallel ranks; repeats that a sampler
            added as padding are not counted twice. ``None`` where no batch size could be read.
        units: Units (examples, tokens, pairs) the main loss term reduced over, over all ranks; ``None``
            where the loss could not be read.
        gradient_scale: Gradient the user's code produced over the gradient meant (1.0 is right), before
            any correction; ``None`` where it is not known.
        weight_spread: Largest over smallest weight of one unit (1.0 is right); ``None`` where not known.
        correction: What the plugin multiplied the gradient by (1.0 where it left it alone).
        lr: Learning rate of each parameter group's first entry, in the optimizer's order.
        grad_norm: 2-norm of the gradient the optimizer is about to see, before clipping.
        microbatches_total: Microbatches per rank since training began, this window included.
        optimizer: Index of the optimizer among those of the run.
        learning_rates: Learning rates of all parameter groups.
    """

    optimizer_step: int
    microbatches: int
    effective_batch: int | None
    units: float | None
    gradient_scale: float | None
    weight_spread: float | None
    correction: float
    lr: float
    grad_norm: float
    microbatches_total: int
    optimizer: int = 0
    learning_rates: tuple[float, ...] = ()

    def metrics(self) -> dict[str, float]:
        """Return the numbers under their metric keys; unknown ones are left out."""
        values = {
            "accum/microbatches": self.microbatches,
            "accum/optimizer_steps": self.optimizer_step + 1,
            "accum/effective_batch": self.effective_batch,
            "accum/units": self.units,
            "accum/gradient_scale": self.gradient_scale,
            "accum/weight_spread": self.weight_spread,
            "accum/correction": self.correction,
            "accum/lr": self.lr,
            "accum/grad_norm": self.grad_norm,
        }
        for group, rate in enumerate(self.learning_rates[1:], start=1):
            values[f"accum/lr/{group}"] = rate
        return {key: float(value) for key, value in values.items() if value is not None}
