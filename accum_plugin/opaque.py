"""Losses that hide how they are reduced: opened by running them once more, eagerly, or told by the split probe."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accum_plugin.equivalence.controlled import open_compiled
from accum_plugin.equivalence.probe import split_probe
from accum_plugin.equivalence.untouched import one_process, undisturbed
from accum_plugin.loss_graph import LossReading, Number, Scale, Term, read_loss, same_scales
from accum_plugin.rules.objective import BatchStatistics

if TYPE_CHECKING:
    from accum_plugin.session import Session

UNKNOWN_COUNT = "what it counts (tokens, pairs) differs between examples and cannot be seen"
UNCOUNTED = "its scale. Whether microbatches weigh alike is not: that takes units=."


@dataclasses.dataclass(frozen=True)
class Opened:
    """What was learned about a loss that the graph does not show.

    Args:
        kind: ``"mean"``, ``"sum"`` or ``"coupled"``; ``"unknown"`` where nothing could tell.
        units_per_example: Units in one example; ``None`` where an example has more or fewer than one, so that the data
            decide.
        scales: Scalars of what was run, the framework's own left out; ``None`` where only values were seen.
        whole: Whether all of the user's loss was run, or only what comes out of the opaque operation.
        size: Relative size of the difference a probe measured, for a coupled loss.
        evidence: ``"graph"`` or ``"probe"``.
        reason: In words.
        batch_statistics: Whether BatchNorm is what couples the examples.
    """

    kind: str
    units_per_example: float | None = 1.0
    scales: tuple[Scale, ...] | None = None
    whole: bool = True
    size: float | None = None
    evidence: str = "probe"
    reason: str = ""
    batch_statistics: bool = False

    def units(self, num_examples: float) -> float | None:
        """Units in a microbatch of so many examples; ``None`` where nothing says.

        Where the data decide, each microbatch of a mean counts as one unit, which leaves its weight as it is.
        """
        if self.units_per_example is not None:
            return self.units_per_example * num_examples
        return 1.0 if self.kind == "mean" else None


class OpaqueLosses:
    """What a session has learned about losses that the graph does not show, each looked into once.

    A loss that can be run again is run again. In a loop where it cannot, compiled code runs eagerly for one
    microbatch, in which the graph can be read.

    Args:
        session: The session it belongs to.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._opened: dict[str, Opened] = {}
        self._eager: contextlib.ExitStack | None = None
        self._opening = ""
        self._difference: str | None = None

    def close(self) -> None:
        """Let compiled code be compiled code again."""
        if self._eager is not None:
            self._eager.close()
            self._eager = None

    def learn(self, reading: LossReading) -> None:
        """Take in the reading of the microbatch that ran eagerly, if this was one."""
        if self._eager is None:
            return
        self.close()
        session = self._session
        if session.num_examples:
            opened = _opened_by(reading, session.num_examples, session.host.framework_divisor())
            self._opened[self._opening] = opened or Opened("unknown", reason="nor does it show when it runs eagerly")

    def open(self, reading: LossReading, batch: Any, units: Number | None) -> LossReading:
        """Return the reading with what is known about its opaque part.

        Args:
            reading: What the graph says.
            batch: The microbatch at hand.
            units: What the user counts in it, where that was declared.
        """
        term, session = reading.opaque, self._session
        num_examples, host = session.num_examples, session.host
        if term is None or batch is None or not num_examples:
            return reading
        replay = None if term.key in self._opened else host.replay(batch)
        if replay is not None:
            self._opened[term.key] = open_loss(*replay, num_examples, host.modules(), whole=host.replays_whole)
            self._say(self._opened[term.key], term.reduction)
        opened = self._opened.get(term.key)
        if opened is None:
            return LossReading(()) if self._run_eagerly(term) else reading
        if opened.kind == "coupled":
            return LossReading(())
        count = opened.units(num_examples) if units is None else units
        if units is None and opened.units_per_example is None and opened.kind == "mean":
            self._session.say_unreadable(f"the loss out of {term.reduction} is a mean, but {UNKNOWN_COUNT}", UNCOUNTED)
        if opened.kind == "unknown" or count is None:
            reason = UNKNOWN_COUNT if count is None else opened.reason
            return dataclasses.replace(reading, unreadable=f"{reading.unreadable} ({reason})")
        return LossReading((resolve(term, opened, count, host.framework_divisor()),))

    def difference(self, batch: Any) -> str:
        """How far the loss of a batch is from that of its two halves, in words; empty where that cannot be run.

        The loss is run a few times more for this, once.
        """
        if self._difference is None:
            self._difference, host = "", self._session.host
            replay = None if batch is None else host.replay(batch)
            if replay is not None:
                verdict = split_probe(*replay, modules=host.modules())
                self._difference = _told(verdict.residual) if verdict.kind == "coupled" else ""
        return self._difference

    def _run_eagerly(self, term: Term) -> bool:
        """Run compiled code eagerly until the next backward pass, where that is safe; whether it was done."""
        alone = len(self._session.windows) == 1  # else the next backward pass may be of another loss
        if not alone or "Compiled" not in term.reduction or not _has_room():
            return False
        self._opening, self._eager = term.key, contextlib.ExitStack()
        self._eager.enter_context(open_compiled())
        return True

    def _say(self, opened: Opened, name: str) -> None:
        size = "" if opened.size is None else _told(opened.size)
        if opened.kind == "coupled" and opened.batch_statistics:
            seen = f"{opened.reason}.{size}"
            self._session.report(BatchStatistics.finding(seen, certainty="info", evidence="probe"))
        elif opened.kind == "coupled":
            self._session.say_coupled(f"the loss out of {name}", "probe", size)


def _told(size: float) -> str:
    return f" A batch and its two halves differ by {size:.2g} of the loss."


def _has_room() -> bool:
    """Whether what compiling saves in memory can be done without: half of the accelerator has never been in use."""
    if not torch.cuda.is_initialized():
        return True
    return 2 * torch.cuda.max_memory_reserved() < torch.cuda.get_device_properties().total_memory


def open_loss(
    loss_fn: Callable[[Any], Any], batch: Any, num_examples: float, modules: list[nn.Module], *, whole: bool = True
) -> Opened:
    """Find out how a loss is reduced by running it again on the same batch, leaving no trace.

    Args:
        loss_fn: The loss of a batch, as the framework's step computes it.
        batch: The microbatch at hand.
        num_examples: Examples in it.
        modules: Everything that ``loss_fn`` runs.
        whole: Whether ``loss_fn`` is all of the user's loss, or only the part that a model computes.
    """
    opened = _opened_by(_eager_reading(loss_fn, batch, modules), num_examples)
    if opened is not None:
        return dataclasses.replace(opened, whole=whole)
    verdict = split_probe(loss_fn, batch, modules=modules)
    return Opened(
        verdict.kind,
        1.0 if verdict.by_examples else None,
        size=verdict.residual,
        reason=verdict.reason,
        batch_statistics=verdict.batch_statistics,
    )


def _opened_by(reading: LossReading, num_examples: float, framework_divisor: int = 1) -> Opened | None:
    """What an eager reading says, if it has one term over data."""
    data = [term for term in reading.terms if term.kind in ("mean", "sum", "coupled")]
    if len(data) != 1 or not data[0].units:
        return None
    term, units, scales = data[0], data[0].units[0], data[0].scales
    count = float(units.tolist()) if isinstance(units, Tensor) else float(units)
    per_example = 1.0 if count == num_examples else None
    if framework_divisor > 1 and same_scales(scales[:1], (Scale(framework_divisor, True, True),)):
        scales = scales[1:]
    return Opened(term.kind, per_example, scales, evidence="graph", reason=f"run eagerly it is {term.reduction}")


def _eager_reading(loss_fn: Callable[[Any], Any], batch: Any, modules: list[nn.Module]) -> LossReading:
    try:
        with undisturbed(modules), one_process(), torch.enable_grad(), open_compiled():
            loss = loss_fn(batch)
            return read_loss(loss) if isinstance(loss, Tensor) else LossReading((), "it returned no tensor")
    except Exception as error:  # the user's own code, run once more
        return LossReading((), f"it could not be run again: {error!r}")


def resolve(opaque: Term, opened: Opened, units: Number, framework_divisor: int) -> Term:
    """Turn the opaque term of one microbatch, of ``units`` units, into one that the ledger can take."""
    scales = opaque.scales
    if opened.scales is not None and opened.whole:  # everything but the framework's own division
        own = [Scale(framework_divisor, True, True)] if framework_divisor > 1 else []
        scales = (*own, *opened.scales)
    elif opened.scales is not None:
        scales = _joined(opaque.scales, opened.scales)
    # Ranks that count different things must not be added up: their keys differ.
    key = opaque.key if opened.units_per_example is not None else f"{opaque.key}(uncounted)"
    return dataclasses.replace(opaque, key=key, kind=opened.kind, units=(units,), scales=scales)


def declared(opaque: Term, units: Number, normalization: str) -> Term:
    """The opaque term as the user declares it: a sum, or else a mean, over ``units`` units."""
    return dataclasses.replace(opaque, kind="sum" if normalization == "sum" else "mean", units=(units,))


def _joined(outer: tuple[Scale, ...], inner: tuple[Scale, ...]) -> tuple[Scale, ...]:
    """Scalars around an opaque part and those in it; what both have seen, next to each other, is taken once."""
    most = min(len(outer), len(inner))
    shared = next((k for k in range(most, 0, -1) if same_scales(outer[-k:], inner[:k])), 0)
    return (*outer, *inner[shared:])
