"""The optimizer boundary: close the window's books, exchange sums, diagnose, correct, record."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from accum_plugin.diagnosis import Cause, Judgement, Window, judge
from accum_plugin.exchange import (
    FAILED,
    FIRST_FIELD,
    Sums,
    device_payload,
    exchange,
    on_host,
    payload_of,
    terms_payload,
)
from accum_plugin.finding import Finding
from accum_plugin.gradient_rules import gradient_causes, spoiled
from accum_plugin.ledger import Ledger, Totals
from accum_plugin.normalization import TermView
from accum_plugin.record import WindowRecord
from accum_plugin.rules import scale as rules
from accum_plugin.verdict import (
    EXACT,
    Judge,
    Verdict,
    boundary_factor,
    correctable,
    escaped_causes,
    own_divisions,
    uneven_causes,
)
from accum_plugin.window import Backward, OptimizerWindow

if TYPE_CHECKING:
    from accum_plugin.neighbors import Clip
    from accum_plugin.session import Session

INSPECTED = 3  # windows in which the host looks closely


class AccumulationError(RuntimeError):
    """Raised in ``mode="raise"`` before the first wrong optimizer step; carries the findings."""

    def __init__(self, findings: list[Finding]) -> None:
        super().__init__("\n".join(finding.message for finding in findings))
        self.findings = findings


class Boundary:
    """Does what has to be done once per optimizer step.

    Args:
        session: The session it belongs to.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._judge = Judge(session.reduction)
        self._longest = 1  # microbatches in the longest window so far
        self._learned_steps = 1  # the same, as the terms of all windows that are open have it
        self._standing: dict[int, tuple[str, float]] = {}  # corrections that go on without the host: term, 1 / target

    # -- inside the window ------------------------------------------------------------------------------------------

    def steps(self) -> int:
        """``K``: as the framework has it, else the longest window so far."""
        configured = self._session.host.steps()
        return configured if configured > 1 else self._learned_steps

    def host_numbers(self, view: TermView) -> TermView:
        """In the first windows, bring counts that live on an accelerator to the host; later leave them there."""
        if any(self._inspecting(window) for window in self._session.windows):
            view.num_units, view.base = on_host(view.num_units), on_host(view.base)
            view.loose = tuple(on_host(number) for number in view.loose)
        return view

    def reopen(self, window: OptimizerWindow) -> None:
        """A backward pass comes: a window that was closed but not stepped on is over (the step was skipped)."""
        if window.closed and window.stepping:
            self._evaluate_again(window)
            window.carries_over = True
        elif window.closed_by_clip:
            window.go_on()
        elif window.closed:
            window.skip_step()

    def _evaluate_again(self, window: OptimizerWindow) -> None:
        """The optimizer calls its closure once more within one step (LBFGS): the window begins anew."""
        window.restart()
        self._session.begin_evaluation()

    def entered(self, window: OptimizerWindow, backward: Backward) -> None:
        """A backward pass contributed to the window's gradients."""
        window.enter(backward)
        window.grad_norm, window.clipped_midway = None, window.clipped
        self._session.host.entered(window)

    def clipping(self, window: OptimizerWindow, clip: Clip) -> None:
        """Gradients are about to be clipped: the boundary, unless the window seems to go on."""
        session, ends, window.clipped = self._session, True, bool(window.backwards)
        if session.failed is None:
            with session.guard():
                ends = self._ends_at_clip(window)
                session.host.clipping(window, clip)
        else:
            with contextlib.suppress(Exception):
                ends = session.host.step_expected(window.optimizer) is not False
        if ends and not window.closed:
            self.reached(window)
            window.closed_by_clip = True

    def _ends_at_clip(self, window: OptimizerWindow) -> bool:
        host = self._session.host
        expected = host.step_expected(window.optimizer)
        if expected is not None:
            return expected
        early = window.age == 0 and window.microbatches < host.steps()
        return not early and not window.clips_inside and host.combined()

    def clearing(self, window: OptimizerWindow) -> None:
        """Gradients are about to be cleared; whether that loses anything is decided when the next ones come."""
        if window.backwards and window.closed and window.stepping:
            self._evaluate_again(window)
        elif window.backwards and (window.closed or self._session.host.step_skipped(window.optimizer)):
            window.skip_step()
        elif window.backwards:
            window.drop_contributions()
        window.sentinel.note_all_cleared()

    # -- agreement before gradients are combined --------------------------------------------------------------------

    def agree(self) -> None:
        """Let the ranks compare their weights before the wrapper mixes their gradients.

        Every rank is here because the wrapper is about to combine gradients on every rank.
        """
        session, payload = self._session, FAILED
        ledger = session.first_terms
        if session.failed is None:
            with session.guard():
                payload = terms_payload(ledger)
        sums = self._exchange(payload)
        if session.failed is None:
            with session.guard():
                if sums.comparable and ledger.layout:
                    counted = self._without_choices(ledger, sums)
                    factors = session.correction.agree(ledger.views, counted, sums.microbatches)
                    self._rescale(factors, ledger.main_key)
                    session.first_terms = Ledger()

    def _without_choices(self, ledger: Ledger, sums: Sums) -> dict[str, Totals]:
        """The terms' totals, less the sums whose divisor no count explains: a normalizer of the user's choice."""
        facts = self._facts(self._session.windows[0], sums.microbatches / sums.num_ranks, 1.0)
        return {
            key: totals
            for key, totals in sums.totals(ledger).items()
            if ledger.views[key].kind != "sum" or judge(ledger.views[key], totals, facts).target is not None
        }

    def _rescale(self, factors: dict[str, float], main: str | None) -> None:
        """Bring what this rank has accumulated, and the backward pass about to run, to the shared references.

        What is accumulated can only be scaled as a whole, by the main term's factor.
        """
        session = self._session
        whole = factors.get(main or "", 1.0)
        for window in session.windows if whole != 1.0 else ():
            if window.backwards:
                window.scale_gradients(whole)
                window.sentinel.rescale(whole)
                for account in window.ledger.accounts.values():
                    account.applied = account.applied * whole
        pending = session.pending
        if pending is not None and factors:
            own = [factors.get(view.key, 1.0) for view in pending.views]
            session.correction.scale_terms(session.pending_loss, session.pending_reading, own)
            pending.applied = tuple(a * b for a, b in zip(pending.applied, own))

    # -- the boundary itself ----------------------------------------------------------------------------------------

    def reached(self, window: OptimizerWindow) -> None:
        """The optimizer is about to step: exchange, diagnose, correct. All ranks pass here, whatever they found."""
        session = self._session
        if window.closed:
            return
        window.closed = True
        if session.reduction.joined:
            return
        device = self._device(window)
        if device is not None and session.failed is None:
            with session.guard():
                self._settle_on_device(window, device)
            return
        payload = FAILED
        if session.failed is None:
            with session.guard():
                unjudged = spoiled(window) or self._steps_early(window)
                payload = payload_of(window, session.host.loss_scale(), self._inspecting(window), unjudged)
        sums = self._exchange(payload)
        verdict = None
        if session.failed is None:
            with session.guard():
                verdict = self._weigh(window, sums)
        agreed = self._compare(window, sums, verdict)
        if verdict is not None and session.failed is None:
            with session.guard():
                self._settle(window, sums, verdict, agreed)

    def _exchange(self, payload: list[float]) -> Sums:
        session = self._session
        sums = exchange(payload, session.reduction)
        if sums.failures and session.reduction.distributed:
            session.fail(RuntimeError("a rank reported an internal error"), " on another rank")
            session.stop()
        return sums

    def _inspecting(self, window: OptimizerWindow) -> bool:
        return window.age < INSPECTED or self._session.host.should_log(window.steps_taken)

    def _device(self, window: OptimizerWindow) -> torch.device | None:
        """The accelerator that this window's counts live on, on a step for which the host need not wait."""
        if self._inspecting(window):
            return None
        return next((n.device for n in window.ledger.fields() if isinstance(n, Tensor)), None)

    def _settle_on_device(self, window: OptimizerWindow, device: torch.device) -> None:
        """Correct as the latest window that the host has read was corrected, without reading this one."""
        session = self._session
        numbers = session.reduction.sum_on_device(device_payload(window, device))
        standing = self._standing.get(window.index)
        if standing is not None and standing[0] in window.ledger.layout:
            index = FIRST_FIELD + 4 * window.ledger.layout.index(standing[0]) + 3
            factor = 1.0 / (numbers[index] * standing[1])
            exact = (factor - 1.0).abs() < EXACT
            window.boundary_factor = torch.where(exact | ~factor.isfinite(), torch.ones_like(factor), factor)
            window.scale_gradients(window.boundary_factor)
        window.pending_record = self._record_fields(window, window.microbatches, None, None, Judgement(None), None)

    def _weigh(self, window: OptimizerWindow, sums: Sums) -> Verdict | None:
        """Come to a verdict on the window from the numbers of all ranks."""
        session = self._session
        microbatches = sums.microbatches / sums.num_ranks
        if not microbatches:
            return None
        if session.host.steps() <= 1 and not window.lost:
            self._longest = max(self._longest, round(microbatches))
        measured = self._judge.measure(sums, window.sentinel.epsilon)
        if window.clipped_midway:  # .grad is no multiple of what was contributed
            measured = dataclasses.replace(measured, ratio=None)
        facts = self._facts(window, microbatches, self._judge.reduction_factor(measured))
        causes = gradient_causes(window, measured, facts, session.reduction)
        totals = sums.totals(window.ledger)
        main = window.ledger.main_key or ""
        judgement, uneven = Judgement(None, target=None), []
        if main in totals and not sums.unjudged:
            view = window.ledger.views[main]
            judgement = self._judge.judge(view, totals[main], facts, measured)
            causes += escaped_causes(window.ledger, view) if judgement.scale is not None else []
            uneven = uneven_causes(view, totals[main], sums, judgement, session.correction.mixed)
        return Verdict(facts, judgement, totals, causes, uneven)

    def _factor(self, window: OptimizerWindow, sums: Sums, verdict: Verdict) -> float:
        """What this rank would multiply the window's gradients by."""
        main = window.ledger.main_key or ""
        if not self._session.correction.enabled:
            return 1.0
        if main not in verdict.totals:
            return sums.kept
        view, totals = window.ledger.views[main], verdict.totals[main]
        heeded = verdict.heeded(self._session.log)
        return boundary_factor(view, totals, verdict.judgement, verdict.facts.reduction, heeded)

    def _compare(self, window: OptimizerWindow, sums: Sums, verdict: Verdict | None) -> tuple[float, float | None]:
        """Return the factor, and the largest over the smallest weight of a unit where known.

        In the first window all ranks compare their factors; where one has failed, or comes to another one, nothing is
        corrected. Whether they do this depends on numbers alone that every rank has.
        """
        session, factor, low, high = self._session, math.nan, math.inf, 0.0
        if verdict is not None and session.failed is None:
            with session.guard():
                factor = self._factor(window, sums, verdict)
                account = window.ledger.main
                low, high = (low, high) if account is None else (account.low, account.high)
        first = window.age == 0
        if (
            session.reduction.distributed
            and not sums.failures
            and (first or not sums.even and self._inspecting(window))
        ):
            known = not math.isnan(factor)
            numbers = [float(not known), factor if known else 0.0, -factor if known else 0.0, high, -low]
            missing, most, least, high, low = session.reduction.maximum(numbers)
            low = -low
            if first and (missing or not math.isclose(most, -least, rel_tol=1e-6)):
                factor = sums.kept
        return factor, 1.0 if sums.even else high / low if 0 < low < math.inf else None

    def _steps_early(self, window: OptimizerWindow) -> bool:
        """Whether the framework says that the window goes on: a step here is a mistake of its own, not of scale."""
        said = self._session.host.announcement(window.optimizer)
        if said is None or not said.announced:
            return False
        window.steps_early = window.steps_early or not said.ends
        return window.steps_early and window.microbatches < self.steps()

    def _facts(self, window: OptimizerWindow, microbatches: float, reduction: float) -> Window:
        session = self._session
        # Only in the first window, in which the ranks compare what they come to.
        several = window.age == 0 and session.host.steps() == 1 and len(window.backwards) > round(microbatches)
        return Window(
            microbatches=microbatches,
            steps=max(self.steps(), self._longest),
            num_ranks=session.reduction.num_ranks,
            reduction=reduction,
            signalled=session.signalled,
            normalization=session.settings.normalization,
            divider=session.host.divider,
            evidence="configuration" if session.reduction.sharded else "graph",
            passes=len(window.backwards) if several else 0,
        )

    def _settle(
        self, window: OptimizerWindow, sums: Sums, verdict: Verdict, agreed: tuple[float, float | None]
    ) -> None:
        """Say what was found, put the gradients right, and open the books of the step."""
        session, (factor, spread) = self._session, agreed
        judgement, main = verdict.judgement, window.ledger.main_key or ""
        heeded = verdict.heeded(session.log)
        fixing = session.correction.enabled and judgement.target is not None and correctable(heeded)
        causes = verdict.worded(spread)
        new = [self._report(window, cause, fixing) for cause in causes]
        wrong = [finding for finding in new if finding is not None and finding.certainty == "certain"]
        if wrong and session.settings.mode == "raise":
            raise AccumulationError(wrong)
        view, total = window.ledger.views.get(main), verdict.totals.get(main)
        if session.correction.enabled and view is not None and total is not None:
            self._remember(window, main, factor, verdict, sums)
        if factor != 1.0:
            window.boundary_factor = factor
            window.scale_gradients(factor)
            self._rewrite(causes)
        window.correction = factor * total.applied / total.weighted if total and total.weighted else factor
        if window.age == 0:
            session.verify(window, own_divisions(view, judgement))
        if not session.host.will_clip(window.optimizer):
            window.measure_norm()
        microbatches = round(sums.microbatches / sums.num_ranks)
        window.pending_record = self._record_fields(window, microbatches, sums.examples, total, judgement, spread)

    def _remember(self, window: OptimizerWindow, main: str, factor: float, verdict: Verdict, sums: Sums) -> None:
        """Keep what later windows start from: references, a standing correction, a divisor to equalize."""
        correction, total = self._session.correction, verdict.totals[main]
        if factor != 1.0:  # steps the host does not wait for get it as well
            self._standing[window.index] = (main, 1.0 / (factor * total.applied))
        if window.ledger.views[main].kind == "sum":
            if verdict.judgement.target is None:
                correction.leave(main)
            elif verdict.uneven and not sums.uneven_within:
                correction.equalize(main, total.weighted / total.units)
        correction.settle(window.ledger.views, verdict.totals, sums.microbatches)
        alone = not self._session.reduction.distributed
        correction.release(window.ledger.accounts, self._open_terms(window), alone=alone)
        self._session.first_terms = Ledger()

    def _open_terms(self, window: OptimizerWindow) -> set[str]:
        """Terms that windows of other optimizers have in their books."""
        return {key for other in self._session.windows if other is not window for key in other.ledger.accounts}

    def _record_fields(
        self,
        window: OptimizerWindow,
        microbatches: int,
        examples: int | None,
        totals: Totals | None,
        judgement: Judgement,
        spread: float | None,
    ) -> dict[str, object]:
        rates = tuple(float(group["lr"]) for group in window.optimizer.param_groups if "lr" in group)
        distinct = 0 if examples is None else examples - self._session.host.repeated_examples()
        return dict(
            microbatches=microbatches,
            effective_batch=distinct if distinct > 0 else None,
            units=totals.units if totals is not None else None,
            gradient_scale=judgement.scale,
            weight_spread=spread,
            correction=window.correction,
            lr=rates[0] if rates else math.nan,
            learning_rates=rates,
        )

    def _rewrite(self, causes: list[Cause]) -> None:
        """Where the user prefers it, make the wrapper add up from now on what the loss has divided already."""
        session = self._session
        averaged = any(cause.rule is rules.GlobalMeanAveraged for cause in causes)
        if averaged and session.settings.rewrite == "reduction" and not session.reduction.rewritten:
            session.reduction.rewrite_to_sum()

    def _report(self, window: OptimizerWindow, cause: Cause, fixing: bool) -> Finding | None:
        """Report a cause; return the finding if it is new."""
        corrected = cause.rule.corrects and fixing and cause.certainty == "certain"
        finding = cause.rule.finding(
            cause.seen,
            factor=cause.factor,
            certainty=cause.certainty,
            evidence=cause.evidence,
            action="corrected" if corrected else "reported",
            optimizer_step=window.steps_taken,
            remedy=cause.remedy,
            cause=f"optimizer {window.index}" if len(self._session.windows) > 1 else cause.term,
        )
        new = self._session.log.is_new(finding)
        self._session.report(finding)
        return finding if new else None

    # -- after the step ---------------------------------------------------------------------------------------------

    def stepped(self, window: OptimizerWindow) -> None:
        """The optimizer has stepped: write the record, and open the next window."""
        session = self._session
        for other in session.windows:
            if other is not window:
                for backward in other.backwards:
                    backward.consumed = backward.consumed or backward in window.backwards
        log = session.host.should_log(window.steps_taken)
        if window.pending_record is not None:
            record = self._record(window, log)
            session.records.append(record)
            session.host.record(record, log)
        session.host.stepped(window)
        window.take_step()
        if not any(other.backwards for other in session.windows):
            self._learned_steps = self._longest
        window.sentinel.inspect = window.age < INSPECTED
        window.sentinel.rotate()

    def _record(self, window: OptimizerWindow, log: bool) -> WindowRecord:
        window.measure_norm()
        norm = window.grad_norm
        waits = isinstance(norm, Tensor) and norm.device.type != "cpu" and not (log or self._inspecting(window))
        return WindowRecord(
            optimizer_step=window.steps_taken,
            grad_norm=math.nan if waits or norm is None else on_host(norm),
            microbatches_total=window.microbatches_total + window.microbatches,
            optimizer=window.index,
            **window.pending_record,
        )
