"""The optimizer boundary: close the window's books, exchange sums, diagnose, correct, record."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from accum_plugin.correction import escaped
from accum_plugin.diagnosis import Cause, Judgement, Window, judge
from accum_plugin.gradient_rules import gradient_causes
from accum_plugin.ledger import HEADER, PAYLOAD, Ledger, Totals
from accum_plugin.measurement import Measurement, measure
from accum_plugin.normalization import TermView
from accum_plugin.record import WindowRecord
from accum_plugin.rules import scale as rules
from accum_plugin.sentinel import SLOTS
from accum_plugin.window import Backward, OptimizerWindow

if TYPE_CHECKING:
    from accum_plugin.session import Session

INSPECTED = 3  # windows in which the host looks closely
STOP, UNEVEN = float(1 << 16), float(1 << 32)  # flags share one slot, each with room for 65535 ranks
EXACT = 1e-9  # a boundary factor nearer to 1 than this is left alone


class Boundary:
    """Does what has to be done once per optimizer step.

    Args:
        session: The session it belongs to.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._learned_steps = 1
        self._reduction: float | None = None
        self._counted: dict[tuple[str, int], tuple[int, ...]] = {}
        self.collectives = 0

    # -- inside the window ------------------------------------------------------------------------------------------

    def steps(self) -> int:
        """``K``: as the framework has it, else the longest window so far."""
        return max(self._session.host.steps(), 1) if self._session.host.steps() > 1 else self._learned_steps

    def host_numbers(self, view: TermView) -> TermView:
        """In the first windows, bring counts that live on an accelerator to the host; later leave them there."""
        if any(w.steps_taken < INSPECTED for w in self._session.windows):
            view.num_units, view.base = _item(view.num_units), _item(view.base)
            view.loose = tuple(_item(number) for number in view.loose)
        return view

    def reopen(self, window: OptimizerWindow) -> None:
        """A backward pass comes: a window that was closed but not stepped on is over (the step was skipped)."""
        if window.closed and window.clipped_at is None:
            window.steps_skipped += 1
            window.microbatches_total += window.microbatches
            window.restart()

    def entered(self, window: OptimizerWindow, backward: Backward) -> None:
        """A backward pass contributed to the window's gradients."""
        window.enter(backward)
        self._session.host.entered(window)

    def clipping(self, window: OptimizerWindow) -> None:
        """Gradients are about to be clipped: the boundary, unless the framework says that the window goes on."""
        session = self._session
        expected = session.host.step_expected(window.optimizer) if session.failed is None else True
        if session.failed is None:
            with session.guard():
                session.host.clipping(window, expected)
        if expected is not False:
            self.reached(window)

    def clearing(self, window: OptimizerWindow) -> None:
        """Gradients are about to be cleared; whether that loses anything is decided when the next ones come."""
        if window.closed and window.backwards:
            window.steps_skipped += 1
            window.microbatches_total += window.microbatches
            window.restart()
        elif window.backwards and self._session.host.step_skipped(window.optimizer):
            window.steps_skipped += 1
            window.restart()
        elif window.backwards:
            window.sentinel.cleared = True
            window.drop_contributions()

    # -- agreement before the first gradients are combined ----------------------------------------------------------

    def agree(self) -> None:
        """Let the ranks compare the weights of the first window, before the wrapper mixes their gradients.

        Every rank is here because the wrapper is about to combine gradients on every rank.
        """
        session = self._session
        payload = [0.0] * PAYLOAD
        ledger = session.first_terms
        with session.guard():
            payload = self._payload(ledger, 0.0)
            payload[3] = float(max((account.microbatches for account in ledger.accounts.values()), default=0))
        summed = self._exchange(payload)
        with session.guard():
            if session.failed is None and self._comparable(summed) and ledger.layout:
                fields = summed[HEADER + 2 * SLOTS :]
                self._rescale(session.correction.agree(ledger.views, ledger.totals(fields), summed[3]), ledger.main_key)
                session.first_terms = Ledger()

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
        payload = [0.0] * PAYLOAD
        if session.failed is None:
            with session.guard():
                identity = self._sample(window, payload)
                payload[HEADER + 2 * SLOTS :] = [_item(n) for n in window.ledger.fields()]
                payload[:4] = self._header(window)
                payload[4], payload[5] = identity, identity * identity
        if session.failed is not None:
            payload = [1.0] + [0.0] * (PAYLOAD - 1)
        summed = self._exchange(payload)
        with session.guard():
            if session.failed is None:
                self._settle(window, summed)

    def _exchange(self, payload: list[float]) -> list[float]:
        session = self._session
        summed = session.reduction.sum(payload)
        self.collectives += session.reduction.distributed
        if summed[0] % STOP and session.reduction.distributed:
            session.fail(RuntimeError("a rank reported an internal error"), " on another rank")
            session.stop()
        return summed

    def _payload(self, ledger: Ledger, sentinel_identity: float) -> list[float]:
        identity = ledger.identity(sentinel_identity)
        header = [0.0] * HEADER
        header[4], header[5] = identity, identity * identity
        return header + [0.0] * (2 * SLOTS) + [_item(number) for number in ledger.fields()]

    def _header(self, window: OptimizerWindow) -> list[float]:
        account = window.ledger.main
        units = _item(account.units) if account is not None else 0.0
        uneven = UNEVEN if account is not None and account.uneven else 0.0
        return [uneven, units * units, window.ledger.examples, float(window.microbatches)]

    def _sample(self, window: OptimizerWindow, payload: list[float]) -> float:
        mine, grads, sizes, identity = window.sentinel.sample(read=self._inspecting(window))
        scale = self._session.host.loss_scale()
        if scale is not None and (scale.device.type == "cpu" or self._inspecting(window)):
            mine = [value / _item(scale) for value in mine]
            sizes = [value / _item(scale) for value in sizes]
        payload[6], payload[7] = sum(g * g for g in grads), sum(sizes)
        payload[HEADER : HEADER + 2 * SLOTS] = mine + grads
        return window.ledger.identity(identity)

    def _inspecting(self, window: OptimizerWindow) -> bool:
        return window.steps_taken < INSPECTED or self._session.host.should_log(window.steps_taken)

    def _comparable(self, summed: list[float]) -> bool:
        """Whether all ranks sent the same layout: all identities are equal exactly when ``n sum x^2 = (sum x)^2``."""
        ranks = self._session.reduction.num_ranks
        return math.isclose(ranks * summed[5], summed[4] ** 2, rel_tol=1e-12)

    def _settle(self, window: OptimizerWindow, summed: list[float]) -> None:
        session, ranks = self._session, self._session.reduction.num_ranks
        microbatches = summed[3] / ranks
        if not microbatches:
            return
        if session.host.steps() <= 1 and not window.lost:
            self._learned_steps = max(self._learned_steps, round(microbatches))
        comparable = self._comparable(summed)
        measured = self._measure(summed) if comparable else Measurement(None, True, True, math.inf)
        reduction = self._reduction_factor(measured)
        facts = self._window_facts(microbatches, reduction)
        totals = window.ledger.totals(summed[HEADER + 2 * SLOTS :]) if comparable else {}
        causes = gradient_causes(window, measured, facts, session.reduction)
        judgement, spread = Judgement(None, target=None), None
        main = window.ledger.main_key
        if main in totals and not window.lost:
            judgement = self._judge(window, main, totals[main], facts, measured)
            spread = self._spread(window, totals[main])
            causes += self._uneven_causes(summed, totals[main], spread, window, facts)
            causes += self._escaped_causes(window, facts)
        causes += judgement.causes
        factor = self._boundary_factor(window, totals.get(main or ""), judgement, facts, causes)
        self._conclude(window, factor, judgement, spread, summed, totals.get(main or ""), causes)

    def _window_facts(self, microbatches: float, reduction: float) -> Window:
        session = self._session
        return Window(
            microbatches=microbatches,
            steps=self.steps(),
            num_ranks=session.reduction.num_ranks,
            reduction=reduction,
            signalled=session.signalled,
            normalization=session.settings.normalization,
            divider=session.host.divider,
        )

    def _measure(self, summed: list[float]) -> Measurement:
        session = self._session
        epsilon = max((w.sentinel.epsilon for w in session.windows), default=0.0)
        if any(getattr(w, "_comm_hooks", ()) for w in session.reduction.wrappers) and not session.reduction.custom_hook:
            epsilon = max(epsilon, 2.0**-11)  # a compressing hook rounds what it sends
        parts = summed[HEADER : HEADER + 2 * SLOTS]
        return measure(parts[:SLOTS], parts[SLOTS:], summed[6], summed[7], session.reduction.num_ranks, epsilon)

    def _reduction_factor(self, measured: Measurement) -> float:
        """``r``: measured where it could be, else as it was before, else as the wrapper documents it."""
        reduction = self._session.reduction
        snapped = measured.snap([1.0 / reduction.num_ranks, 1.0])
        if snapped is not None:
            self._reduction = snapped
        elif measured.ratio is not None and measured.scalar:
            return measured.ratio
        if self._reduction is not None:
            return self._reduction
        return reduction.expected or 1.0 / reduction.num_ranks

    def _judge(
        self, window: OptimizerWindow, key: str, totals: Totals, facts: Window, measured: Measurement
    ) -> Judgement:
        view = window.ledger.views[key]
        memory = (key, len(view.loose))
        judgement = judge(view, totals, facts, self._counted.get(memory))
        known = 1.0 / facts.num_ranks if self._session.reduction.expected is None else self._session.reduction.expected
        if judgement.scale != 1.0 and measured.snap([1.0 / facts.num_ranks, 1.0]) is None and facts.reduction != known:
            # a scaling of gradients by the user's own hand: only powers of K are certainly about accumulation
            judgement = self._judge_scaled(view, totals, facts, known)
        if judgement.scale == 1.0 and not judgement.causes:
            self._counted[memory] = judgement.counted
        return judgement

    def _judge_scaled(self, view: TermView, totals: Totals, facts: Window, known: float) -> Judgement:
        relative = facts.reduction / known
        base = dataclasses.replace(facts, reduction=known)
        for power in (-1, 1):
            if facts.steps > 1 and math.isclose(relative, float(facts.steps) ** power, rel_tol=1e-4):
                scaled = dataclasses.replace(
                    view, user_power=view.user_power + power, base=view.base / float(facts.steps) ** power
                )
                factor = float(facts.steps) ** power
                moved = Totals(totals.units, totals.weighted * factor, totals.squares * factor**2, totals.applied * factor)
                return judge(scaled, moved, base)
        return judge(view, totals, base)

    def _spread(self, window: OptimizerWindow, totals: Totals) -> float | None:
        """Largest over smallest weight; over all ranks in the first window and when logging, else on this rank."""
        account = window.ledger.main
        low, high = (account.low, account.high) if account is not None else (math.inf, 0.0)
        even = totals.even
        reduction = self._session.reduction
        if reduction.distributed and not even and self._inspecting(window):
            high, negative = reduction.maximum([high, -low])
            low = -negative
            self.collectives += 1
        if even:
            return 1.0
        return high / low if 0 < low < math.inf else None

    def _uneven_causes(
        self, summed: list[float], totals: Totals, spread: float | None, window: OptimizerWindow, facts: Window
    ) -> list[Cause]:
        if spread is None or totals.even or window.ledger.views[window.ledger.main_key or ""].kind == "penalty":
            return []
        if window.ledger.views[window.ledger.main_key or ""].kind == "sum":
            return self._uneven_sum(window, totals, spread)
        causes = []
        said = f"a unit in the smallest microbatch counts {spread:.2f} times as much as one in the largest"
        if summed[0] >= UNEVEN:
            causes.append(
                Cause(rules.UnequalMicrobatches, None, f"microbatches of one window hold different numbers of units; {said}.")
            )
        if facts.num_ranks > 1 and facts.num_ranks * summed[1] > totals.units**2 * (1 + 1e-9):
            causes.append(Cause(rules.UnequalRanks, None, f"ranks hold different numbers of units; {said}."))
        return causes

    def _uneven_sum(self, window: OptimizerWindow, totals: Totals, spread: float) -> list[Cause]:
        key = window.ledger.main_key or ""
        view = window.ledger.views[key]
        if not view.loose or not self._counted.get((key, len(view.loose))):
            return []
        self._session.correction.equalize(key, totals.weighted / totals.units)
        said = f"the divisor differs between ranks: a unit counts up to {spread:.2f} times as much as another."
        return [Cause(rules.UnequalRanks, None, said)]

    def _escaped_causes(self, window: OptimizerWindow, facts: Window) -> list[Cause]:
        views = window.ledger.views
        main = views[window.ledger.main_key or ""]
        causes = []
        for key, account in window.ledger.accounts.items():
            factor = escaped(account.view, main) if account.view.kind == "mean" else 1.0
            if factor != 1.0:
                seen = f"a term of the loss ({account.view.label}) escapes the division that the main term gets"
                rule = rules.AccumulationNotDivided if main.user_power else rules.LocalMeanSummed
                causes.append(Cause(rule, 1.0 / factor, f"{seen}: it weighs {1 / factor:.2f} times too much.", term=key))
        return causes

    def _boundary_factor(
        self, window: OptimizerWindow, totals: Totals | None, judgement: Judgement, facts: Window, causes: list[Cause]
    ) -> float:
        session = self._session
        if not session.correction.enabled or totals is None or judgement.target is None or not totals.applied:
            return 1.0
        certain = [cause for cause in causes if cause.certainty == "certain" and not session.log.ignores(cause.rule.code)]
        blocking = [c for c in causes if c.rule in (rules.RanksDiverge, rules.UnknownReduction)]
        if blocking or not certain:
            return 1.0
        view = window.ledger.views[window.ledger.main_key or ""]
        counted = 1.0
        if view.kind == "mean":
            for index in judgement.counted:
                counted *= float(view.loose[index])
        reduction = facts.reduction
        factor = judgement.target * judgement.coefficient / (reduction * totals.applied * counted)
        return 1.0 if abs(factor - 1.0) < EXACT else factor

    def _conclude(
        self,
        window: OptimizerWindow,
        factor: float,
        judgement: Judgement,
        spread: float | None,
        summed: list[float],
        totals: Totals | None,
        causes: list[Cause],
    ) -> None:
        session = self._session
        fixing = session.correction.enabled and judgement.target is not None
        product = math.prod(cause.factor for cause in judgement.causes if cause.factor is not None)
        if len(judgement.causes) > 1:
            together = f" All causes together: {product:.4g} times."
            causes = [dataclasses.replace(c, seen=c.seen + together) if c in judgement.causes else c for c in causes]
        new = [self._report(window, cause, fixing) for cause in causes]
        if session.settings.mode == "raise" and any(finding and finding.certainty == "certain" for finding in new):
            from accum_plugin.session import AccumulationError

            raise AccumulationError([finding for finding in new if finding])
        if factor != 1.0:
            window.scale_gradients(factor)
        if window.steps_taken == 0:
            session.verify(window, self._own_divisions(window, judgement))
        if session.correction.enabled and totals is not None:
            every = window.ledger.totals(summed[HEADER + 2 * SLOTS :])
            session.correction.settle(window.ledger.views, every, summed[3])
            session.first_terms = Ledger()
            self._rewrite(judgement, factor, causes)
        window.correction = factor * totals.applied / totals.weighted if totals and totals.weighted else factor
        if not session.host.will_clip(window.optimizer):
            window.measure_norm()
        rates = tuple(float(group["lr"]) for group in window.optimizer.param_groups if "lr" in group)
        examples = round(summed[2]) - session.host.repeated_examples()
        window.pending_record = dict(
            microbatches=round(summed[3] / session.reduction.num_ranks),
            effective_batch=examples if examples > 0 else None,
            units=totals.units if totals is not None else None,
            gradient_scale=judgement.scale,
            weight_spread=spread,
            correction=window.correction,
            lr=rates[0] if rates else math.nan,
            learning_rates=rates,
        )

    def _own_divisions(self, window: OptimizerWindow, judgement: Judgement) -> float:
        """What the user's own code multiplies the main term by on account of ``K`` and ``n``."""
        view = window.ledger.views.get(window.ledger.main_key or "")
        if view is None or view.kind != "mean":
            return 1.0
        loose = math.prod(float(view.loose[index]) for index in judgement.counted)
        return view.counted / view.framework * loose

    def _rewrite(self, judgement: Judgement, factor: float, causes: list[Cause]) -> None:
        """Where the user prefers it, make the wrapper add up from now on what the loss has divided already."""
        session = self._session
        averaged = any(cause.rule is rules.GlobalMeanAveraged for cause in causes) and factor != 1.0
        if averaged and session.settings.rewrite == "reduction" and not session.reduction.rewritten:
            session.reduction.rewrite_to_sum()

    def _report(self, window: OptimizerWindow, cause: Cause, fixing: bool):
        correctable = cause.rule.corrects and fixing and cause.certainty == "certain"
        finding = cause.rule.finding(
            cause.seen,
            factor=cause.factor,
            certainty=cause.certainty,
            evidence=cause.evidence,
            action="corrected" if correctable else "reported",
            optimizer_step=window.steps_taken,
            remedy=cause.remedy,
            cause=f"optimizer {window.index}" if len(self._session.windows) > 1 else cause.term,
        )
        new = not self._session.log.ignores(finding.code) and self._session.log.is_new(finding)
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
        window.microbatches_total += window.microbatches
        if window.pending_record is not None:
            window.measure_norm()
            record = WindowRecord(
                optimizer_step=window.steps_taken,
                grad_norm=float(window.grad_norm or 0.0),
                microbatches_total=window.microbatches_total,
                optimizer=window.index,
                **window.pending_record,
            )
            session.records.append(record)
            session.host.record(record, session.host.should_log(window.steps_taken))
        session.host.stepped(window)
        window.steps_taken += 1
        window.restart()
        window.sentinel.inspect = window.steps_taken < INSPECTED
        window.sentinel.rotate()


def _item(number: float | Tensor) -> float:
    """Read a number on the host; a synchronization where it lives on an accelerator."""
    return float(number.tolist()) if isinstance(number, torch.Tensor) else float(number)
