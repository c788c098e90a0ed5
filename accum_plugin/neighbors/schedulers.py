"""ACC203 and ACC209: how often a learning-rate scheduler advances, and whether its length fits."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from accum_plugin.finding import Finding
from accum_plugin.neighbors.base import Neighbor
from accum_plugin.neighbors.horizon import read_horizon
from accum_plugin.neighbors.lengths import Run, judge_length
from accum_plugin.rules.boundary import SchedulerPerMicrobatch

if TYPE_CHECKING:
    from accum_plugin.session import Session
    from accum_plugin.window import OptimizerWindow

REPEATED = 3  # windows in a row before two advances per step are believed to be no accident


@dataclasses.dataclass(frozen=True)
class Schedule:
    """One scheduler and how it is driven.

    Args:
        scheduler: The PyTorch scheduler itself.
        per_step: Advances that the framework makes at an optimizer step (Accelerate: ``n``); 1 for the user's own.
        managed: Whether the framework advances it.
        advances: Times it will advance in the whole training, where the framework knows.
        pace: How often, in words.
    """

    scheduler: Any
    per_step: int = 1
    managed: bool = False
    advances: int | None = None
    pace: str = "once per optimizer step"


class _Followed:
    """One scheduler's position, and what it was at its optimizer's last step."""

    def __init__(self, schedule: Schedule, window: OptimizerWindow) -> None:
        self.schedule, self.window = schedule, window
        self.start = self.position
        self.start_steps = window.steps_taken
        self.start_microbatches = window.microbatches_total + window.microbatches
        self.mark()
        self.marked = False  # what came before the first step is no whole window
        self.repeats: tuple[int, int] = (0, 0)  # advances, windows in a row with as many

    @property
    def position(self) -> int:
        return int(getattr(self.schedule.scheduler, "last_epoch", 0))

    @property
    def microbatches(self) -> int:
        """Microbatches run so far, the open window's included."""
        return self.window.microbatches_total + self.window.microbatches

    def mark(self) -> None:
        window = self.window
        self.last = self.position, self.microbatches, window.steps_skipped
        self.marked = True


class Schedulers(Neighbor):
    """Follows every scheduler of the watched optimizers by reading its position: nothing is wrapped."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._followed: list[_Followed] | None = None
        self._epochs = 0

    def before_backward(self) -> None:
        """Search for schedulers, once, and compare planned lengths."""
        if self._followed is None:
            self._followed = self._search()
            for followed in self._followed:
                self._judge_plan(followed)

    def stepped(self, window: OptimizerWindow) -> None:
        """Compare how far each scheduler has come since the step before."""
        for followed in self._followed or ():
            if followed.window is window:
                if followed.marked:
                    self._judge_advances(followed)
                followed.mark()

    def epoch_ended(self) -> None:
        """Count epochs: lengths may be off by one in each, for rounding."""
        self._epochs += 1

    def finish(self) -> None:
        """Training ends: compare every scheduler's position with its length."""
        for followed in self._followed or ():
            for finding in (self._whole_run(followed), self._judge_position(followed)):
                if finding is not None:
                    self.session.report(finding)

    def standing(self) -> list[Finding]:
        """What :meth:`finish` would say."""
        found = [f for each in self._followed or () for f in (self._whole_run(each), self._judge_position(each))]
        return [finding for finding in found if finding is not None]

    # -- search -----------------------------------------------------------------------------------------------------

    def _search(self) -> list[_Followed]:
        followed = self._follow(self.host.schedules())
        known = {each.window.index for each in followed}
        unknown = [window for window in self.session.windows if window.index not in known]
        if not any(has_scheduler(window.optimizer) for window in unknown):
            return followed
        return followed + self._follow([Schedule(each) for each in find_schedulers()])

    def _follow(self, schedules: list[Schedule]) -> list[_Followed]:
        owners = [(schedule, owner_of(schedule.scheduler)) for schedule in schedules]
        windows = [(s, None if owner is None else self.session.window_of(owner)) for s, owner in owners]
        return [_Followed(schedule, window) for schedule, window in windows if window is not None]

    # -- judge ------------------------------------------------------------------------------------------------------

    def _judge_plan(self, followed: _Followed) -> None:
        run, schedule = self.host.planned_run(), followed.schedule
        horizon = read_horizon(schedule.scheduler)
        if run is not None and schedule.advances is not None and horizon is not None:
            finding = judge_length(horizon, schedule.advances, schedule.pace, run)
            if finding is not None:
                self.report(finding)

    def _judge_advances(self, followed: _Followed) -> None:
        window = followed.window
        position, microbatches, skipped = followed.last
        advances = followed.position - position
        before, count = followed.repeats
        followed.repeats = advances, count + 1 if advances == before else 1
        finding = judge_advances(
            followed.schedule,
            advances,
            followed.microbatches - microbatches,
            window.steps_skipped - skipped,
            followed.repeats[1],
            self.session.reduction.num_ranks,
        )
        if finding is not None:
            self.report(dataclasses.replace(finding, optimizer_step=window.steps_taken))

    def _whole_run(self, followed: _Followed) -> Finding | None:
        """A run of a single step has no window between two steps; its advances as a whole say as much."""
        window = followed.window
        if window.steps_taken - followed.start_steps != 1 or window.steps_skipped:
            return None
        microbatches = followed.microbatches - followed.start_microbatches
        advances = followed.position - followed.start
        return judge_advances(followed.schedule, advances, microbatches, 0, 1, self.session.reduction.num_ranks)

    def _judge_position(self, followed: _Followed) -> Finding | None:
        window, schedule = followed.window, followed.schedule
        steps = window.steps_taken - followed.start_steps
        advances = followed.position - followed.start
        horizon = read_horizon(schedule.scheduler)
        regular = advances >= steps or advances == self._epochs
        if schedule.advances is not None or horizon is None or not steps or followed.start or not regular:
            return None
        run = Run(
            steps,
            followed.microbatches - followed.start_microbatches,
            self._epochs or None,
            self.session.reduction.num_ranks,
            "measured",
        )
        often = "once" if advances == steps else f"{advances / steps:.3g} times"
        pace = "once per epoch" if advances < steps else f"{often} per optimizer step"
        return judge_length(horizon, advances, pace, run)


def judge_advances(
    schedule: Schedule, advances: int, microbatches: int, skipped: int, repeated: int, num_ranks: int
) -> Finding | None:
    """Judge how often a scheduler advanced between two optimizer steps.

    Args:
        schedule: The scheduler.
        advances: Times it advanced.
        microbatches: Microbatches run.
        skipped: Optimizer steps left out for an fp16 overflow.
        repeated: Windows in a row with as many advances.
        num_ranks: Data-parallel ranks.
    """
    name = type(schedule.scheduler).__name__
    if skipped and advances == (1 + skipped) * schedule.per_step:
        steps = "1 optimizer step was" if skipped == 1 else f"{skipped} optimizer steps were"
        seen = f"{steps} skipped for an fp16 overflow, and {name} advanced all the same: it is {skipped} ahead."
        remedy = "Step the scheduler only when the optimizer has stepped."
        return SchedulerPerMicrobatch.finding(seen, certainty="info", remedy=remedy, cause=f"skipped {name}")
    if advances <= schedule.per_step or advances == num_ranks != microbatches:
        return None
    seen = f"{name} advanced {advances} times for one optimizer step of {microbatches} microbatches"
    if microbatches > 1 and advances % microbatches == 0:
        return SchedulerPerMicrobatch.finding(f"{seen}, once per microbatch: {advances} times too fast.", cause=name)
    if microbatches > 1 and advances == microbatches + 1:
        return SchedulerPerMicrobatch.finding(
            f"{seen}: once per microbatch, and once more with the step.", certainty="suspected", cause=name
        )
    if repeated >= REPEATED and microbatches == 1:
        return SchedulerPerMicrobatch.finding(f"{seen}, every time.", certainty="suspected", cause=name)
    return None


def has_scheduler(optimizer: torch.optim.Optimizer) -> bool:
    """Whether some scheduler was made for an optimizer: it leaves the initial learning rate in every group."""
    return any("initial_lr" in group for group in optimizer.param_groups)


def find_schedulers() -> list[LRScheduler]:
    """Every scheduler alive in the process that is no part of another one (tenths of a second: once in a run)."""
    # isinstance() would wake proxies
    found = [item for item in gc.get_objects() if issubclass(type(item), LRScheduler)]
    parts = {id(part) for scheduler in found for value in vars(scheduler).values() for part in _parts(value)}
    return [scheduler for scheduler in found if id(scheduler) not in parts]


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, LRScheduler):
        return (value,)
    return [item for item in value if isinstance(item, LRScheduler)] if isinstance(value, (list, tuple)) else ()


def owner_of(scheduler: Any) -> torch.optim.Optimizer | None:
    """The PyTorch optimizer that a scheduler drives, out of a framework's wrapper."""
    optimizer = getattr(scheduler, "optimizer", None)
    while optimizer is not None:
        inner = getattr(optimizer, "optimizer", None)
        if inner is None:
            return optimizer
        optimizer = inner
    return None
