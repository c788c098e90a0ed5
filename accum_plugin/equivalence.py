"""The decisive test: one window of the real run against the same examples as one batch on one process.

Gradients are compared, before clipping and before the optimizer: Adam hides a factor of four. Nothing is assumed about
the loss; the window's examples are simply put together.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accum_plugin.batches import CannotSplit, batch_size, join_batches, map_tensors, split_batch
from accum_plugin.comparison import INCONCLUSIVE, EquivalenceReport, Reference, compare, name_factor
from accum_plugin.controlled import open_compiled, random_layers_off
from accum_plugin.diagnose_split import explain
from accum_plugin.reference import CannotCheck, OneProcess
from accum_plugin.untouched import one_process, undisturbed, unwrapped

__all__ = ["EquivalenceProbe", "EquivalenceReport", "check_equivalence"]

LossFunction = Callable[[nn.Module, Any], Any]


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
        join: Makes one batch of several, where :func:`~accum_plugin.batches.join_batches` cannot.
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
    ranks = _Ranks(model, process_group)
    replayable = gradients is None or step is not None or backward is not None
    found: dict[str, Any] = {"ranks": ranks.size}
    try:
        gathered = ranks.together(lambda: _packed(microbatches))
        parts = [_unpacked(blob, ranks) for blob in gathered] if ranks.size > 1 else [list(microbatches)]
        parts, subset = _subset(parts, max_examples)
        found |= _counts(parts)
        if subset and not replayable:
            raise CannotCheck(f"a subset of {max_examples} examples needs the real code: give step= or backward=")
        run = step or _plain_step(loss_fn, backward)
        window = _Window(model, parts, ranks, run, list(gradients) if gradients is not None and not subset else None)
        options = {"units": units, "normalization": normalization, "join": join}
        outcome = window.check(reference or loss_fn, options, replayable, tolerance)
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


class _Ranks:
    """The data-parallel ranks, which must come together at each stage, whatever happened to one of them."""

    def __init__(self, model: nn.Module, group: Any) -> None:
        if group is None and isinstance(model, DistributedDataParallel):
            group = model.process_group
        self._group = group
        active = dist.is_available() and dist.is_initialized()
        self.size = dist.get_world_size(group) if active else 1
        self.rank = dist.get_rank(group) if active else 0
        parameter = next(model.parameters(), None)
        self.device = torch.device("cpu") if parameter is None else parameter.device

    def together(self, work: Callable[[], Any]) -> list[Any]:
        """Run ``work`` on every rank and return all results.

        Raises:
            CannotCheck: On every rank, if ``work`` raised on one of them.
        """
        outcome: tuple[Any, str] = (None, "")
        try:
            outcome = (work(), "")
        except (CannotCheck, CannotSplit) as error:
            outcome = (None, str(error))
        except Exception as error:  # the user's own code; other ranks are waiting
            outcome = (None, f"rank {self.rank} failed with {error!r}")
        outcomes: list[Any] = [outcome]
        if self.size > 1:
            outcomes = [None] * self.size
            dist.all_gather_object(outcomes, outcome, group=self._group)
        if reasons := [reason for _, reason in outcomes if reason]:
            raise CannotCheck(reasons[0])
        return [result for result, _ in outcomes]


class _Window:
    """One window, every rank's microbatches known, run both ways."""

    def __init__(
        self, model: nn.Module, parts: list[list[Any]], ranks: _Ranks, step: Any, given: list[Tensor | None] | None
    ) -> None:
        self._model, self._parts, self._ranks, self._step, self._given = model, parts, ranks, step, given
        self._random_off = False

    def check(self, loss_fn: LossFunction, options: Any, replayable: bool, tolerance: float | None) -> dict[str, Any]:
        """Return the comparison of the rank that deviates most, and what explains it."""
        one: list[OneProcess] = []
        flat = [part for parts in self._parts for part in parts if batch_size(part) != 0]
        if not flat:
            raise CannotCheck("the window holds no examples")

        def prepare() -> bool:
            one.append(OneProcess(self._model, flat, loss_fn, **options))
            with self._alone():
                return one[0].draws_random_numbers()

        statistical = any(self._ranks.together(prepare))
        if statistical and replayable:
            self._random_off, self._given = True, None
            statistical = any(self._ranks.together(prepare))
        meant: list[Reference] = []
        self._ranks.together(lambda: self._keep(meant, lambda: one[-1].reference(statistical=statistical)))
        real: list[Any] = []
        self._ranks.together(lambda: real.append(self._real()))
        names = [name for name, _ in unwrapped(self._model).named_parameters()]
        compared = self._ranks.together(lambda: compare(real[0], meant[0], names, tolerance))
        worst = max(range(len(compared)), key=lambda rank: (not compared[rank]["equivalent"], compared[rank]["deviation"]))
        outcome = {**compared[worst], "statistical": statistical, "joined": one[-1].joined}
        outcome["ranks_agree"] = _agree(compared)
        if not outcome["equivalent"] and not outcome["is_scalar"] and not statistical and outcome["ranks_agree"]:
            explained: list[Any] = []
            self._ranks.together(lambda: self._keep(explained, lambda: explain(one[-1], real[0], meant[0])))
            outcome |= explained[0]
        return outcome

    def _keep(self, place: list[Any], work: Callable[[], Any]) -> None:
        with self._alone():
            place.append(work())

    @contextlib.contextmanager
    def _alone(self) -> Any:
        """Run as one process, leaving no trace."""
        with undisturbed([self._model]), one_process(), open_compiled(), self._quiet():
            yield

    def _quiet(self) -> Any:
        return random_layers_off([self._model]) if self._random_off else contextlib.nullcontext()

    def _real(self) -> list[Tensor | None]:
        if self._given is not None:
            return self._given
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


def _packed(microbatches: Sequence[Any]) -> bytes:
    """Return this rank's microbatches as bytes (clones: a view would take its whole storage along)."""
    buffer = io.BytesIO()
    torch.save([map_tensors(batch, torch.clone) for batch in microbatches], buffer)
    return buffer.getvalue()


def _unpacked(blob: bytes, ranks: _Ranks) -> list[Any]:
    """Return another rank's microbatches; what was on its accelerator comes to ours, the rest stays on the host."""

    def place(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else storage.to(device=ranks.device)

    # These bytes come from the ranks of this very run, which all_gather_object would unpickle just the same.
    return torch.load(io.BytesIO(blob), map_location=place, weights_only=False)


def _counts(parts: list[list[Any]]) -> dict[str, int]:
    sizes = [batch_size(batch) or 0 for rank in parts for batch in rank]
    return {"examples": sum(sizes), "microbatches": max(len(rank) for rank in parts)}


def _subset(parts: list[list[Any]], limit: int | None) -> tuple[list[list[Any]], bool]:
    """Cut every microbatch down by the same ratio, so that about ``limit`` examples are left."""
    total = _counts(parts)["examples"]
    if limit is None or total <= limit:
        return parts, False
    try:
        return [[_cut(batch, limit / total) for batch in rank] for rank in parts], True
    except CannotSplit as error:
        raise CannotCheck(f"no subset could be taken: {error}") from error


def _cut(batch: Any, share: float) -> Any:
    size = batch_size(batch) or 0
    return split_batch(batch, 0, max(1, int(size * share))) if size else batch


def _agree(compared: list[dict[str, Any]]) -> bool:
    """Whether all ranks hold the same gradient, as far as their comparisons show."""
    deviations = [one["deviation"] for one in compared]
    factors = [one["factor"] for one in compared]
    limit = compared[0]["tolerance"]
    return all(max(v) - min(v) <= limit * max(1.0, abs(max(v))) or min(v) == max(v) for v in (deviations, factors))


def _report(outcome: dict[str, Any], found: dict[str, Any], steps: int) -> EquivalenceReport:
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
