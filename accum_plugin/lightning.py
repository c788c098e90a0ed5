"""AccumulationCallback: the session's Lightning side. It translates callbacks and holds no arithmetic."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from accum_plugin.finding import Finding
from accum_plugin.host import Host, count_examples
from accum_plugin.loggers import LightningLog
from accum_plugin.loss_graph import LossReading
from accum_plugin.neighbors import Announcement, Padding, Run, Schedule
from accum_plugin.neighbors.configuration import contradictions
from accum_plugin.neighbors.samplers import sampler_padding
from accum_plugin.record import WindowRecord
from accum_plugin.reduction import Reduction
from accum_plugin.rerun import training_loss
from accum_plugin.rules.plugin import PluginDisabled
from accum_plugin.session import Session
from accum_plugin.settings import Settings
from accum_plugin.summary import Summary


def _guarded(hook: Callable[..., None]) -> Callable[..., None]:
    """Let an error inside a hook switch the plugin off, never the run."""

    @functools.wraps(hook)
    def run(self: AccumulationCallback, *args: Any, **kwargs: Any) -> None:
        session = self._session
        if session is None or session.failed is not None:
            return
        with session.guard():
            hook(self, *args, **kwargs)

    return run


class AccumulationCallback(Callback):
    """Checks, and puts right, how a Trainer's run divides its gradients.

    Add it to a Trainer: ``Trainer(callbacks=[AccumulationCallback()])``.

    Args:
        mode: ``"fix"`` corrects what is certain and reports the rest, ``"warn"`` only reports, ``"raise"`` stops
            before the first wrong optimizer step.
        rewrite: What a fix changes: ``"loss"`` scales losses and gradients, ``"reduction"`` makes DDP add up
            instead of averaging where the loss is divided by the global count.
        normalization: ``"auto"``, or what the window's gradient is meant to be: ``"mean"``, ``"sum"``.
        units: ``Callable[[batch], int | Tensor]``: units in a microbatch, where the loss cannot tell.
        verify: Run the one-step equivalence check in the first window.
        ignore: Rule codes to silence, for example ``("ACC301",)``.
        log_every_n_steps: Optimizer steps between two log entries; ``None`` takes the Trainer's.

    Raises:
        ValueError: If a keyword has a value it cannot take.
        TypeError: If ``units`` cannot be called.

    It logs, to every logger of the Trainer:

    ======================== ==================================================================
    key                      meaning
    ======================== ==================================================================
    accum/microbatches       microbatches in the window, per data-parallel rank
    accum/optimizer_steps    optimizer steps taken
    accum/effective_batch    examples over all microbatches and data-parallel ranks
    accum/units              units (examples, tokens) the loss reduced over
    accum/gradient_scale     gradient the code produced over the gradient meant, before correction
    accum/weight_spread      largest over smallest weight of one unit
    accum/correction         what the plugin multiplied the gradient by
    accum/lr                 learning rate (``accum/lr/<group>`` for further parameter groups)
    accum/grad_norm          2-norm of the gradient the optimizer is about to see, before clipping
    ======================== ==================================================================
    """

    def __init__(
        self,
        mode: str = "fix",
        *,
        rewrite: str = "loss",
        normalization: str = "auto",
        units: Callable[[Any], int | Tensor] | None = None,
        verify: bool = False,
        ignore: Sequence[str] = (),
        log_every_n_steps: int | None = None,
    ) -> None:
        codes = (ignore,) if isinstance(ignore, str) else tuple(ignore)
        self.settings = Settings(mode, rewrite, normalization, units, verify, codes, log_every_n_steps)
        self._session: Session | None = None
        self._loaded: dict[str, Any] | None = None
        self._unstarted: list[Finding] = []

    # -- what users read --------------------------------------------------------------------------------------------

    @property
    def findings(self) -> list[Finding]:
        """What was found so far, one entry per code and cause."""
        return self._unstarted if self._session is None else self._session.log.findings

    @property
    def windows(self) -> Sequence[WindowRecord]:
        """The latest accumulation windows, oldest first (bounded)."""
        return () if self._session is None else self._session.records

    @property
    def last_window(self) -> WindowRecord | None:
        """The window that ended last."""
        return self.windows[-1] if self.windows else None

    # -- Lightning's hooks ------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        failure = "on another rank"
        try:
            self._start(trainer, pl_module)
            started = True
        except Exception as error:
            started, failure = False, repr(error)
        if not trainer.strategy.reduce_boolean_decision(started):  # one rank alone would wait for the others
            self._finish()
            self._session = None
            self._unstarted = [PluginDisabled.finding(f"it could not start ({failure}).", certainty="info")]
            rank_zero_warn(self._unstarted[0].message)

    def _start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        reduction = Reduction([trainer.strategy.model], num_ranks=_data_parallel_ranks(trainer))
        host = LightningHost(trainer, pl_module, self.settings, reduction)
        self._session = Session(self.settings, host, trainer.optimizers, reduction)
        self._session.start()
        self._begin(trainer)

    @_guarded
    def _begin(self, trainer: Trainer) -> None:
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            self._session.load_state_dict(loaded)
        session = self._session
        for finding in contradictions(
            [trainer.strategy.model], session.reduction, session.host.steps(), session.host.divider
        ):
            session.report(finding)

    @_guarded
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        num_examples = count_examples(batch)
        self._session.host.summary.num_examples = num_examples
        self._session.begin_microbatch(batch, num_examples)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        session = self._session
        if session is None or session.host.engine_goes_on():
            return
        window = session.window_of(optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer)
        if window is not None:
            session.boundary.reached(window)
            session.stepping(window)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._session is not None:
            self._session.host.bypassed = False

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._session is not None:
            self._session.host.bypassed = True

    @_guarded
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._session.host.neighbors.epoch_ended()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._conclude(trainer)
        self._finish()

    @_guarded
    def _conclude(self, trainer: Trainer) -> None:
        if not trainer.interrupted and self._session.active:
            self._session.host.neighbors.finish()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._finish()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._finish()

    def state_dict(self) -> dict[str, Any]:
        """Counters to go on with after a resume, and the effective batch they belong to."""
        return self._loaded or {} if self._session is None else self._session.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a checkpoint's counters until training starts."""
        self._loaded = state_dict

    def _finish(self) -> None:
        if self._session is not None and self._session.installed:
            self._session.stop()


class LightningHost(Host):
    """Answers the session's questions from the Trainer.

    Args:
        trainer: The Trainer that runs.
        pl_module: The module it trains.
        settings: What the user asked for.
        reduction: How ranks are combined.
    """

    explicit = True
    bypassed = True  # until Lightning says that it runs a backward pass

    def __init__(self, trainer: Trainer, pl_module: LightningModule, settings: Settings, reduction: Reduction) -> None:
        self._trainer, self._module, self._settings = trainer, pl_module, settings
        self._log = LightningLog(trainer)
        self._num_ranks = reduction.num_ranks
        self.summary = Summary(self, reduction, show=trainer.is_global_zero)

    @property
    def divider(self) -> str:  # type: ignore[override]
        return f"Trainer(accumulate_grad_batches={self._trainer.accumulate_grad_batches})"

    def steps(self) -> int:
        return self._trainer.accumulate_grad_batches if self._module.automatic_optimization else 1

    def framework_divisor(self) -> int:
        return self.steps()

    def loss_scale(self) -> Tensor | None:
        scale = getattr(getattr(self._trainer.precision_plugin, "scaler", None), "_scale", None)
        return super().loss_scale() if scale is None else scale

    def step_expected(self, optimizer: torch.optim.Optimizer) -> bool | None:
        # in automatic optimization on_before_optimizer_step is the boundary, and comes before the Trainer's clipping
        return False if self._module.automatic_optimization else None

    def engine_goes_on(self) -> bool:
        return self._trainer.strategy.handles_gradient_accumulation and self._trainer.fit_loop._should_accumulate()

    def step_skipped(self, optimizer: torch.optim.Optimizer) -> bool:
        return False  # on_before_optimizer_step has closed the window already

    def will_clip(self, optimizer: torch.optim.Optimizer) -> bool:
        trainer = self._trainer
        by_norm = str(getattr(trainer.gradient_clip_algorithm, "value", "norm") or "norm") == "norm"
        stock = not is_overridden("configure_gradient_clipping", self._module)
        return bool(trainer.gradient_clip_val) and by_norm and stock and self._module.automatic_optimization

    def loss_function(self) -> Callable[[Any], Any] | None:
        return training_loss(self._trainer, self._module)

    def modules(self) -> list[torch.nn.Module]:
        return [self._module]

    def before_backward(self, loss: Tensor, reading: LossReading) -> None:
        self.summary.show_once(reading)
        super().before_backward(loss, reading)

    def announcement(self, optimizer: torch.optim.Optimizer) -> Announcement | None:
        if not self._module.automatic_optimization or self.steps() == 1:
            return None
        return Announcement(announced=True, ends=not self._trainer.fit_loop._should_accumulate())

    def steps_at_the_end(self) -> bool:
        return self._module.automatic_optimization

    def at_end_of_data(self) -> bool:
        return bool(self._trainer.is_last_batch)

    def padding(self) -> Padding | None:
        loaders = self._trainer.train_dataloader
        return sampler_padding(getattr(loaders, "sampler", None))

    def skipped_by_bypass(self) -> tuple[str, ...]:
        skipped = []
        if self.steps() > 1:
            skipped.append(f"the division by {self.steps()}")
        if getattr(self._trainer.precision_plugin, "scaler", None) is not None:
            skipped.append("the fp16 loss scale")
        wrapped = isinstance(self._trainer.strategy.model, DistributedDataParallel)
        if wrapped and not self._module.automatic_optimization:
            skipped.append("the preparation of DDP's reduction")
        return tuple(skipped)

    def schedules(self) -> list[Schedule]:
        if not self._module.automatic_optimization:
            return []
        run = self.planned_run()
        return [_schedule(config, run) for config in self._trainer.lr_scheduler_configs if not config.reduce_on_plateau]

    def planned_run(self) -> Run | None:
        trainer = self._trainer
        lengths = (trainer.max_epochs, trainer.num_training_batches, trainer.accumulate_grad_batches)
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        changing = any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks)
        steps = math.inf if changing else trainer.estimated_stepping_batches
        if not self._module.automatic_optimization or not 0 < steps < math.inf:
            return None
        epochs, batches, accumulated = lengths
        whole = max(1, math.ceil(batches / accumulated)) if batches < math.inf else None
        if trainer.max_steps != -1:
            epochs = None if whole is None else math.ceil(steps / whole)
        microbatches = int(batches * epochs) if whole is not None and epochs else int(steps) * accumulated
        return Run(int(steps), microbatches, epochs, self._num_ranks)

    def should_log(self, optimizer_step: int) -> bool:
        every = self._settings.log_every_n_steps or self._trainer.log_every_n_steps
        return bool(every) and (optimizer_step + 1) % every == 0

    def announce(self, finding: Finding) -> None:
        self._log.finding(finding)

    def record(self, record: WindowRecord, log: bool) -> None:
        if log:
            self._log.metrics(record)


def _schedule(config: Any, run: Run | None) -> Schedule:
    """One of Lightning's scheduler configurations, with the number of times Lightning will advance it."""
    every, by_epoch = max(config.frequency, 1), config.interval == "epoch"
    total = None if run is None else run.epochs if by_epoch else run.optimizer_steps
    pace = config.interval if by_epoch else "optimizer step"
    often = f"once per {pace}" if every == 1 else f"once in {every} {pace}s"
    return Schedule(config.scheduler, managed=True, advances=None if total is None else total // every, pace=often)


def _data_parallel_ranks(trainer: Trainer) -> int | None:
    """Ranks that get different examples, as the strategy tells its distributed sampler."""
    if trainer.world_size == 1:
        return None
    arguments = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
    return arguments.get("num_replicas", trainer.world_size)
