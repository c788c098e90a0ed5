"""The decisive test: one window of the real run against the same examples as one batch on one process.

Gradients are compared, before clipping and before the optimizer: Adam hides a factor of four. Nothing is assumed about
the loss; the window's examples are simply put together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accum_plugin.equivalence.batches import batch_size, join_batches, map_tensors
from accum_plugin.equivalence.comparison import INCONCLUSIVE, EquivalenceReport, Reference, compare, flat, name_factor
from accum_plugin.equivalence.controlled import open_compiled, random_layers_off
from accum_plugin.equivalence.diagnose_split import explain
from accum_plugin.equivalence.gathering import Ranks, counts, gather, subset
from accum_plugin.equivalence.reference import CannotCheck, OneProcess
from accum_plugin.equivalence.untouched import one_process, undisturbed, unwrapped

__all__ = ["EquivalenceProbe", "EquivalenceReport", "check_equivalence"]

LossFunction = Callable[[nn.Module, Any], Any]
Outcome = dict[str, Any]


def check_equivalence(
    model: nn.Module,
    microbatches: Sequence[Any],
    loss_fn: LossFunction,
    *,
    gradients: Iterable[Tensor | None] | None = None,
    step: Callable[[nn.Module, list[Any]], Any] | None = None,
    backward: Callable[[Tensor], Any] | None = None,
    reference: LossFunction | None = None,
    units: Callable[[Any], Any] | None = None,
    normalization: str = "mean",
    join: Callable[[list[Any]], Any] = join_batches,
    accumulation_steps: int | None = None,
    process_group: Any = None,
    tolerance: float | None = None,
    max_examples: int | None = None,
) -> EquivalenceReport:
    """Compare the gradient of one accumulation window with that of one full batch on one process.

    Every data-parallel rank must call it, with its own microbatches. Weights, ``.grad``, buffers, training flags and
    the random state are as before when it returns. Dropout and other random layers are switched off on both sides;
    where that is not possible (``gradients`` came from a run that had them on, or the loss itself draws numbers), the
    reference is the mean of several draws and the tolerance comes from their spread.

    Args:
        model: The model that trains, wrapped in ``DistributedDataParallel`` or bare.
        microbatches: This rank's microbatches of one window, as ``loss_fn`` takes them.
        loss_fn: ``loss_fn(model, batch)``: the loss of a batch. The reference runs it on the joined batch.
        gradients: What the real run is about to hand to its optimizer, one per ``model.parameters()``, unclipped and
            unscaled, for the weights as they stand; ``None`` runs the window here.
        step: ``step(model, microbatches)``: the real code of a window, every backward pass included and the optimizer
            left out. Overrides ``backward``.
        backward: What the real code does with each microbatch's loss, for example ``accelerator.backward``; the
            default is ``loss.backward()``, synchronized at the last microbatch only.
        reference: ``reference(model, batch)``: the loss of one full batch as one process would define it, where
            ``loss_fn`` knows about ranks or accumulation in a way that one process does not show.
        units: Units in a batch, used where microbatches cannot be joined (sequences padded to different lengths).
        normalization: ``"mean"`` or ``"sum"``: how such microbatches' losses make up the full batch's.
        join: Makes one batch of several, where :func:`~accum_plugin.equivalence.batches.join_batches` cannot.
        accumulation_steps: Nominal microbatches in a window, ``K``; ``None`` takes the number given.
        process_group: The data-parallel ranks; ``None`` takes the wrapper's group, or the default one.
        tolerance: Relative deviation to accept; ``None`` measures it, by nudging weights and inputs by one rounding
            unit of the coarsest type that the forward pass uses.
        max_examples: Both sides run on a subset of about so many examples where the window holds more.

    Returns:
        The report, the same on every rank. What keeps the check from running is its ``reason``, not an exception.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> halves = [torch.ones(3, 2), -torch.ones(3, 2)]
        >>> report = check_equivalence(net, halves, lambda net, x: net(x).square().mean(), accumulation_steps=2)
        >>> report.equivalent, report.factor_name
        (False, 'K')
    """
    ranks = Ranks(model, process_group)
    replayable = gradients is None or step is not None or backward is not None
    found: dict[str, Any] = {"ranks": ranks.size}
    try:
        parts, is_subset = subset(gather(microbatches, ranks), max_examples)
        found |= counts(parts)
        if is_subset and not replayable:
            raise CannotCheck(f"a subset of {max_examples} examples needs the real code: give step= or backward=")
        given = None if gradients is None or is_subset else list(gradients)

        def make(batches: list[Any]) -> OneProcess:
            loss = reference or loss_fn
            return OneProcess(model, batches, loss, units=units, normalization=normalization, join=join)

        window = _Window(model, parts, ranks, step or _plain_step(loss_fn, backward), given)
        outcome = window.check(make, replayable, tolerance)
    except CannotCheck as error:
        return EquivalenceReport(**found, reason=str(error))
    return _report(outcome, found, accumulation_steps or found["microbatches"])


class EquivalenceProbe:
    """Keeps one window's inputs, by reference, and checks them at its end: what ``verify=True`` uses.

    Args:
        options: Further keywords of :func:`check_equivalence`.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self.microbatches: list[Any] = []

    def record(self, batch: Any) -> None:
        """Keep a microbatch; its containers are copied (a loss may pop from them), its tensors are not."""
        self.microbatches.append(map_tensors(batch, lambda tensor: tensor))

    def check(
        self, model: nn.Module, loss_fn: LossFunction, gradients: Iterable[Tensor | None] | None = None, **options: Any
    ) -> EquivalenceReport:
        """Run :func:`check_equivalence` on what was recorded and forget it."""
        try:
            return check_equivalence(
                model, self.microbatches, loss_fn, gradients=gradients, **{**self._options, **options}
            )
        finally:
            self.clear()

    def clear(self) -> None:
        """Forget the window's inputs."""
        self.microbatches = []


class _Window:
    """One window, every rank's microbatches known, run both ways."""

    def __init__(
        self, model: nn.Module, parts: list[list[Any]], ranks: Ranks, step: Any, given: list[Tensor | None] | None
    ) -> None:
        self._model, self._parts, self._ranks, self._step, self._given = model, parts, ranks, step, given
        self._random_off = False

    def check(self, make: Callable[[list[Any]], OneProcess], replayable: bool, tolerance: float | None) -> Outcome:
        """Return the comparison of the rank that deviates most, and what explains it."""
        ranks = self._ranks
        parts = [part for rank in self._parts for part in rank if batch_size(part) != 0]
        one: OneProcess = ranks.each(lambda: make(parts))
        statistical = any(ranks.together(lambda: self._alone(one.draws_random_numbers)))
        if statistical and replayable:
            self._random_off, self._given = True, None
            statistical = any(ranks.together(lambda: self._alone(one.draws_random_numbers)))
        meant: Reference = ranks.each(lambda: self._alone(lambda: one.reference(statistical=statistical)))
        real = ranks.each(self._real)
        names = [name for name, _ in unwrapped(self._model).named_parameters()]
        compared = ranks.together(lambda: compare(real, meant, names, tolerance))
        worst = max(compared, key=lambda found: (not found["equivalent"], found["deviation"]))
        outcome = {**worst, "statistical": statistical, "joined": one.joined, "ranks_agree": _agree(compared)}
        if not (worst["equivalent"] or worst["is_scalar"] or statistical) and outcome["ranks_agree"]:
            outcome |= ranks.each(lambda: self._alone(lambda: explain(one, real, meant)))
        return outcome

    def _alone(self, work: Callable[[], Any]) -> Any:
        """Run ``work`` as one process, leaving no trace."""
        with undisturbed([self._model]), one_process(), open_compiled(), self._quiet():
            return work()

    def _quiet(self) -> contextlib.AbstractContextManager[None]:
        return random_layers_off([self._model]) if self._random_off else contextlib.nullcontext()

    def _real(self) -> list[Tensor | None]:
        real = self._replayed() if self._given is None else self._given
        if len(real) != (expected := len(list(self._model.parameters()))):
            raise CannotCheck(f"gradients= holds {len(real)} gradients for {expected} parameters")
        if not all(bool(torch.isfinite(flat(grad)).all()) for grad in real if grad is not None):
            raise CannotCheck("the real run's gradient is not finite")
        return real

    def _replayed(self) -> list[Tensor | None]:
        if isinstance(self._model, DistributedDataParallel) and not all(self._parts):
            raise CannotCheck(f"rank {self._parts.index([])} has no microbatch, for which the others would wait")
        mine = self._parts[self._ranks.rank]
        with undisturbed([self._model]), self._quiet():
            self._step(self._model, [map_tensors(part, torch.clone) for part in mine])
            return [None if p.grad is None else p.grad.detach().clone() for p in self._model.parameters()]


def _plain_step(loss_fn: LossFunction, backward: Callable[[Tensor], Any] | None) -> Callable[..., None]:
    """Return the usual window: backward at each microbatch, ranks combined at the last."""

    def step(model: nn.Module, microbatches: list[Any]) -> None:
        for index, batch in enumerate(microbatches):
            waits = index < len(microbatches) - 1 and isinstance(model, DistributedDataParallel)
            with model.no_sync() if waits else contextlib.nullcontext():
                loss = loss_fn(model, batch)
                loss.backward() if backward is None else backward(loss)

    return step


def _agree(compared: list[Outcome]) -> bool:
    """Whether all ranks hold the same gradient, as far as their comparisons show."""
    deviations = [one["deviation"] for one in compared]
    factors = [one["factor"] for one in compared]
    limit = compared[0]["tolerance"]
    return all(max(v) - min(v) <= limit * max(1.0, abs(max(v))) or min(v) == max(v) for v in (deviations, factors))


def _report(outcome: Outcome, found: dict[str, Any], steps: int) -> EquivalenceReport:
    statistical, joined = outcome.pop("statistical"), outcome.pop("joined")
    is_scalar, ranks_agree = outcome.pop("is_scalar"), outcome.pop("ranks_agree")
    reason, name, limit = outcome.pop("reason", ""), "", outcome["tolerance"]
    source = "measured over draws of the random layers" if statistical else "measured by perturbation"
    if not outcome["equivalent"]:
        if not ranks_agree:
            reason = "the ranks hold different gradients"
        elif is_scalar:
            sizes = {"ranks": found["ranks"], "steps": steps, "microbatches": found["microbatches"]}
            name = name_factor(outcome["factor"], **sizes, tolerance=max(limit, 1e-6))
    elif limit > INCONCLUSIVE:
        reason = f"random layers or rounding blur the gradient by {limit:.0%}, too much to tell right from wrong"
        outcome["equivalent"] = None
    if not joined:
        note = "the microbatches could not be joined and were added up by units=, so that coupled examples do not show"
        reason = f"{reason}; {note}" if reason else note
    return EquivalenceReport(**found, **outcome, factor_name=name, tolerance_source=source, reason=reason)
