"""The one flow: observe a backward pass, account for it, and at the optimizer boundary diagnose, correct, report.

A framework's adapter is the session's :class:`Host`; it translates callbacks into this flow and holds no arithmetic.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from accum_plugin.boundary import AccumulationError, Boundary
from accum_plugin.correction import Correction
from accum_plugin.equivalence import EquivalenceProbe, EquivalenceReport
from accum_plugin.finding import Finding, FindingLog
from accum_plugin.host import Host
from accum_plugin.ledger import Ledger
from accum_plugin.loss_graph import LossReading, Term, read_loss
from accum_plugin.neighbors import Clip
from accum_plugin.normalization import Divisors, TermView, declared_view, view_term
from accum_plugin.opaque import OpaqueLosses, declared
from accum_plugin.record import WindowRecord
from accum_plugin.reduction import Reduction
from accum_plugin.rules.objective import CoupledLoss, NotEquivalent
from accum_plugin.rules.plugin import LossUnreadable, PluginDisabled
from accum_plugin.settings import Settings
from accum_plugin.taps import OptimizerTap, backward_tap, clip_taps, norm_tap
from accum_plugin.window import Backward, OptimizerWindow

KEPT_WINDOWS = 1000
NOTHING_READ = LossReading(())


class _Guard:
    """Turns an error of ours into the end of the session; a class, since it is entered at every event."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if not isinstance(error, Exception) or isinstance(error, AccumulationError):
            return False
        self._session.fail(error)
        return True


class Session:
    """Watches one run's optimizers from attach to detach.

    Args:
        settings: What the user asked for.
        host: The framework's side.
        optimizers: PyTorch optimizers of the run; more can follow with :meth:`watch`.
        reduction: How ranks are combined.
        log: Findings to go on with; a new log if left out.
        records: Windows to go on with; none if left out.
    """

    def __init__(
        self,
        settings: Settings,
        host: Host,
        optimizers: Iterable[torch.optim.Optimizer],
        reduction: Reduction,
        *,
        log: FindingLog | None = None,
        records: collections.deque[WindowRecord] | None = None,
    ) -> None:
        self.settings = settings
        self.host = host
        self.reduction = reduction
        self.log = FindingLog(settings.ignore) if log is None else log
        self.records = collections.deque(maxlen=KEPT_WINDOWS) if records is None else records
        self.windows: list[OptimizerWindow] = []
        uneven = {"ACC106", "ACC107"} if reduction.num_ranks > 1 else {"ACC106"}
        self.correction = Correction(settings.mode == "fix", equalizes=not uneven <= set(settings.ignore))
        self._guard = _Guard(self)
        self.boundary = Boundary(self)
        self.active = False
        self.failed: BaseException | None = None
        self._taps: list[OptimizerTap] = []
        self._parameters: set[int] = set()
        self._microbatch = 0
        self._seen: dict[str, int] = {}
        self._tickets = 0
        self._examples: float | None = None
        self._batch: Any = None
        self.pending: Backward | None = None
        self.pending_loss: Tensor | None = None
        self.pending_reading = NOTHING_READ
        self.first_terms = Ledger()  # what the ranks compare once, before the first gradients are combined
        self.signalled = False
        self._norm_type = 2.0
        self.opaque = OpaqueLosses(self)
        self._divisors = Divisors()
        self._known_views: dict[str, tuple[Any, TermView]] = {}
        self._said_coupled = False
        self._uncoupled: set[str] = set()  # terms that were searched for a comparison of examples and have none
        self._verification = EquivalenceProbe() if settings.verify else None
        self.verification: EquivalenceReport | None = None
        for optimizer in optimizers:
            self.watch(optimizer)

    # -- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to listen; every rank must call this."""
        self.reduction.prepare()
        self.active = True
        for tap in (backward_tap, norm_tap, *clip_taps):
            tap.add(self)
        self.host.started(self)

    def stop(self) -> None:
        """Stop listening and leave no hook behind."""
        self.active = False
        for tap in (backward_tap, norm_tap, *clip_taps):
            tap.discard(self)
        self.host.stopped()
        for tap in self._taps:
            tap.remove()
        for window in self.windows:
            window.sentinel.remove()
        self._taps = []
        self.correction.forget_hooks()
        self.opaque.close()

    @property
    def installed(self) -> bool:
        """Whether anything of the session's is still on an optimizer or in PyTorch."""
        return self.active or bool(self._taps)

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Follow one more optimizer (again: nothing happens)."""
        if any(window.optimizer is optimizer for window in self.windows):
            return
        window = OptimizerWindow(optimizer, len(self.windows))
        self.windows.append(window)
        self._taps.append(OptimizerTap(optimizer, self))
        self._parameters.update(id(p) for p in window.parameters())

    def window_of(self, optimizer: torch.optim.Optimizer) -> OptimizerWindow | None:
        """The window of ``optimizer``, if it is watched."""
        return next((window for window in self.windows if window.optimizer is optimizer), None)

    def guard(self) -> _Guard:
        """Let no error of ours reach the run: it switches the plugin off instead (ACC902)."""
        return self._guard

    def fail(self, error: BaseException, where: str = "") -> None:
        """Switch the plugin off after an internal error; ranks still waiting are told at the next boundary."""
        if self.failed is not None:
            return
        self.failed = error
        self.correction.forget_hooks()
        self.opaque.close()
        for window in self.windows:
            window.sentinel.remove()
        said = f"{type(error).__name__}: {error}"[:300]
        with contextlib.suppress(Exception):
            self.report(
                PluginDisabled.finding(
                    f"an internal error switched the plugin off{where}; training goes on unchecked ({said}).",
                    certainty="info",
                )
            )
        if not self.reduction.distributed:
            self.stop()

    def report(self, finding: Finding) -> None:
        """Record a finding; tell the user if it is new."""
        if self.log.add(finding):
            self.host.announce(finding)

    # -- observe ----------------------------------------------------------------------------------------------------

    def begin_microbatch(self, batch: Any = None, num_examples: float | None = None) -> None:
        """A new microbatch starts (a training step, an ``accumulate()`` block)."""
        self.signalled = True
        self._tickets = 1
        self.note_batch(batch, num_examples)

    def begin_evaluation(self) -> None:
        """The same microbatch is about to be evaluated again, for the same step."""
        self._seen = {}
        self._microbatch += 1

    def add_ticket(self, batch: Any = None, num_examples: float | None = None) -> None:
        """A batch was drawn from the loader: one more microbatch may start, now or later (loaders prefetch)."""
        self.signalled = True
        self._tickets += 1
        self.note_batch(batch, num_examples)

    def note_batch(self, batch: Any, num_examples: float | None) -> None:
        """A batch is about to be used."""
        self._batch, self._examples = batch, num_examples
        if self._verification is not None and batch is not None:
            self._verification.record(batch)

    def at_hand(self, batch: Any, num_examples: float | None) -> None:
        """The model is called with a batch that was drawn before, maybe not the latest."""
        self._examples = num_examples
        if batch is not None:
            self._batch = batch

    @property
    def num_examples(self) -> float | None:
        """Examples in the current microbatch on this rank, where known."""
        return self._examples

    def state_dict(self) -> dict[str, Any]:
        """Counters of every optimizer, and the effective batch they belong to."""
        return {"optimizers": [window.state_dict() for window in self.windows], **self.host.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with saved counters."""
        for window, saved in zip(self.windows, state.get("optimizers", ())):
            window.load_state_dict(saved)
        self.host.load_state_dict(state)

    def before_backward(self, loss: Tensor, gradient: Any) -> None:
        """Account for a backward pass that is about to run."""
        if self.failed is None:
            with self.guard():
                self._observe(loss, gradient)
        if self.failed is not None:  # keep meeting the other ranks at the boundary until they know
            for window in self.windows:
                window.closed = False
        reduction = self.reduction
        if reduction.distributed and not reduction.joined and self.correction.needs_agreement and reduction.in_step():
            self.boundary.agree()

    def _observe(self, loss: Tensor, gradient: Any) -> None:
        self.pending, self.pending_loss = None, loss
        if not loss.requires_grad or not self._is_ours(loss):
            return
        for window in self.windows:
            self.boundary.reopen(window)
        reading = self._read(loss, gradient)
        self.opaque.learn(reading)
        self.pending_reading = reading
        signature = reading.signature or "opaque"
        repeat = self._place(signature)
        views = self._views(reading, repeat)
        reading = self.pending_reading
        # Ranks may have left a join: without the boundary's exchange, nothing would put a scaled microbatch right.
        joined = self.reduction.joined
        applied = (1.0,) * len(views) if joined else self.correction.before_backward(loss, reading, views)
        if self.correction.needs_agreement:
            for view, factor in zip(views, applied):
                self.first_terms.add(view, factor)
        self.pending = Backward(self._microbatch, f"{repeat}:{signature}", views, applied, self._examples)
        self.host.before_backward(loss, reading)

    def after_backward(self, loss: Tensor) -> None:
        """Book the backward pass with every optimizer whose gradients it contributed to."""
        pending, self.pending, self.pending_loss = self.pending, None, None
        self.correction.forget_hooks()
        if self._settled:
            self.pending_reading = NOTHING_READ  # the graph's nodes are not ours to keep
        if pending is None or self.failed is not None:
            return
        with self.guard():
            alone = len(self.windows) == 1
            for window in self.windows:
                if window.sentinel.error is not None:
                    raise window.sentinel.error
                if window.sentinel.take_fired() or alone:
                    self.boundary.entered(window, pending)

    @property
    def _settled(self) -> bool:
        """Whether every optimizer has stepped twice: what is only looked at in the beginning has been seen."""
        return all(window.steps_taken > 1 for window in self.windows)

    def _is_ours(self, loss: Tensor) -> bool:
        """Whether the nearest parameter below the loss belongs to a watched optimizer (or none is near)."""
        if self.reduction.sharded:
            return True  # the graph ends in unsharded parameters that no optimizer knows
        stack, visited = [loss.grad_fn], 0
        while stack and visited < 200:
            node = stack.pop()
            if node is None:
                continue
            visited += 1
            edges = node.next_functions
            if edges:
                stack += [edge[0] for edge in edges]
            elif id(getattr(node, "variable", None)) in self._parameters:
                return True
        return bool(stack) or loss.is_leaf

    def _read(self, loss: Tensor, gradient: Any) -> LossReading:
        if gradient is not None or loss.dim() > 0 and loss.numel() > 1:
            return LossReading((), "backward() was given a gradient of its own, not a scalar loss")
        reading = read_loss(loss, loss_scale=self.host.loss_scale(), uncoupled=self._uncoupled)
        if any(term.parts for term in reading.terms):
            steps = self.boundary.steps()
            unknown = steps == 1 and any(window.age == 0 for window in self.windows)
            reading = reading.told_apart(
                None if unknown else {steps, self.host.framework_divisor(), self.reduction.num_ranks}
            )
        return reading

    def _place(self, signature: str) -> int:
        """Decide which microbatch a backward pass belongs to; return how often this loss ran in it before.

        The same loss again is a new microbatch where the framework announced one. Two backward passes within one
        (real and fake examples of a GAN's discriminator) are two terms of it.
        """
        repeated = self._seen.get(signature, 0)
        if repeated and not self.signalled or self._tickets and (repeated or not self._seen or self.host.explicit):
            self._microbatch += 1
            self._tickets = max(0, self._tickets - 1)
            self._seen = {}
            repeated = 0
        self._seen[signature] = repeated + 1
        return repeated

    def _views(self, reading: LossReading, repeat: int) -> tuple[TermView, ...]:
        units, meant = self._declared_units(), self.settings.normalization
        if reading.opaque is not None and (units is None or meant == "auto"):
            reading = self.pending_reading = self.opaque.open(reading, self._batch, units)
        if reading.unreadable and units is None:
            self.say_unreadable(reading.unreadable)
            return ()
        if reading.unreadable and reading.opaque is None:
            return (declared_view(units, meant, self._context()),)
        if reading.unreadable:
            reading = self.pending_reading = LossReading((declared(reading.opaque, units, meant),))
        context, num_terms = self._context(), len(reading.terms)
        views = []
        for term in reading.terms:
            if term.kind == "coupled":
                self.say_coupled(f"a term of the loss ({term.reduction})", "graph")
            elif self._settled:
                self._uncoupled.add(term.key)
            views.append(self._view(term, f"{repeat}:{term.key}" if repeat else term.key, num_terms, context))
        if units is not None and views:
            views[0] = dataclasses.replace(views[0])
            views[0].redeclare(units)
        return tuple(views)

    def _view(self, term: Term, key: str, num_terms: int, context: dict[str, int]) -> TermView:
        """The term with roles for its scalars; the last one again where nothing about the term has changed."""
        now = (term.kind, term.units, term.scales, num_terms, self._examples, context)
        hosted = not any(isinstance(n, Tensor) for n in (*term.units, *(scale.value for scale in term.scales)))
        known = self._known_views.get(key)
        if hosted and known is not None and known[0] == now:
            return known[1]
        view = view_term(term, num_terms=num_terms, num_examples=self._examples, divisors=self._divisors, **context)
        view = self.boundary.host_numbers(view)
        view.key = key
        if hosted:
            self._known_views[key] = (now, view)
        return view

    def say_coupled(self, what: str, evidence: str, size: str | None = None) -> None:
        """Report a loss that compares examples, where the window has more than one microbatch."""
        alone = max(self.boundary.steps(), self.reduction.num_ranks) == 1
        if self._said_coupled or alone or self.log.ignores(CoupledLoss.code):
            return
        self._said_coupled = True
        size = self.difference() if size is None else size
        seen = f"{what} compares examples with each other, or is not linear in them: it has no weight per example."
        self.report(CoupledLoss.finding(seen + size, certainty="info", evidence=evidence))

    def difference(self) -> str:
        """How far the loss of the batch at hand is from that of its halves, in words, where that can be run."""
        return self.opaque.difference(self._batch)

    def _context(self) -> dict[str, int]:
        return {
            "framework_divisor": self.host.framework_divisor(),
            "steps": self.boundary.steps(),
            "num_ranks": self.reduction.num_ranks,
        }

    def _declared_units(self) -> Any:
        if self.settings.units is None or self._batch is None:
            return None
        units = self.settings.units(self._batch)
        return units if isinstance(units, Tensor) and units.device.type != "cpu" else float(units)

    def say_unreadable(self, reason: str, checked: str = "the gradients, and what the configuration says.") -> None:
        """Report, once, what cannot be read and what is checked instead."""
        seen = f"{reason}. What is checked instead: {checked}"
        self.report(LossUnreadable.finding(seen, certainty="info", evidence="graph"))

    # -- the decisive check -----------------------------------------------------------------------------------------

    def verify(self, window: OptimizerWindow, own_divisions: float) -> None:
        """Compare the first window's gradient, corrected, with one batch on one process. Every rank must call this.

        Args:
            window: The window whose gradients stand ready.
            own_divisions: What the user's own code multiplies the loss by on account of ``K`` and ``n``; one process
                with one batch would not.
        """
        probe, self._verification = self._verification, None
        loss_fn = self.host.loss_function()
        if probe is None:
            return
        if loss_fn is None or len(self.windows) > 1:  # the same on every rank: check() is a collective
            self.report(
                NotEquivalent.finding("this loop's loss cannot be run again: nothing was verified.", certainty="info")
            )
            return
        model = self.host.modules()[0]
        report = probe.check(
            model,
            lambda _, batch: loss_fn(batch) / own_divisions,
            [p.grad for p in model.parameters()],
            units=self.settings.units,
            accumulation_steps=self.boundary.steps(),
        )
        self.verification = report
        if report.equivalent is False:
            self.report(
                NotEquivalent.finding(str(report), factor=report.factor, evidence="measured", certainty="certain")
            )
        elif report.equivalent is None:
            self.report(NotEquivalent.finding(str(report), certainty="info", evidence="measured"))

    # -- the optimizer boundary -------------------------------------------------------------------------------------

    def before_clip(self, grads: list[Tensor], threshold: float, norm: Tensor | None) -> None:
        """Gradients are about to be clipped; where the boundary scales them first, their norm follows."""
        clip = Clip(threshold, norm)
        known = {id(grad) for grad in grads}
        owners = [window for window in self.windows if any(id(grad) in known for grad in window.grads())]
        before = [window.boundary_factor for window in owners]
        for window in owners:
            self.boundary.clipping(window, clip)
        if norm is not None and any(window.boundary_factor is not old for window, old in zip(owners, before)):
            norm.copy_(norm_tap.original(grads, self._norm_type))

    def after_norm(self, grads: list[Tensor], norm: Tensor, norm_type: float) -> None:
        """A norm was computed: share it, so that ours costs no pass of its own."""
        self._norm_type = norm_type
        if self.failed is None and norm_type == 2.0:
            with self.guard():
                known = {id(grad) for grad in grads}
                for window in self.windows:
                    own = window.grads()
                    if window.grad_norm is None and len(own) == len(grads) and all(id(g) in known for g in own):
                        window.grad_norm = norm.detach()

    def before_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None
    ) -> Callable[[], Any] | None:
        """The optimizer is about to step; return what it should call instead of its closure, if it has one.

        A closure computes the gradients, so the boundary comes after it, unless the framework has announced it from
        inside. A subclass whose ``step`` calls ``super().step()`` runs PyTorch's hooks twice, one within the other.
        """
        window = self.window_of(optimizer)
        if window is None:
            return closure
        window.in_step, window.stepping = True, closure is not None
        if closure is None:
            self._reach(window)
            return None

        def closing() -> Any:
            loss = closure()
            self._reach(window)
            return loss

        return closing

    def _reach(self, window: OptimizerWindow) -> None:
        if not self.host.engine_goes_on():
            self.boundary.reached(window)
            self.stepping(window)

    def stepping(self, window: OptimizerWindow) -> None:
        """The optimizer is about to step on a window whose books are closed (told again: nothing happens)."""
        if self.failed is None and not window.told:
            window.told = True
            with self.guard():
                self.host.stepping(window)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has stepped."""
        window = self.window_of(optimizer)
        if window is None or not window.in_step:
            return
        window.in_step = window.stepping = False
        if self.host.engine_goes_on():
            return
        if self.failed is None:
            with self.guard():
                self.boundary.stepped(window)

    def on_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Gradients are about to be cleared."""
        window = self.window_of(optimizer)
        if window is not None and self.failed is None:
            with self.guard():
                self.boundary.clearing(window)
