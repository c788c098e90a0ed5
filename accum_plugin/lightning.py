"""AccumulationCallback: the session's Lightning side. It translates callbacks and holds no arithmetic."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from accum_plugin.finding import Finding
from accum_plugin.host import Host, count_examples
from accum_plugin.loggers import LightningLog
from accum_plugin.loss_graph import LossReading
from accum_plugin.record import WindowRecord
from accum_plugin.reduction import Reduction
from accum_plugin.rerun import training_loss
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

    # -- what users read --------------------------------------------------------------------------------------------

    @property
    def findings(self) -> list[Finding]:
        """What was found so far, one entry per code and cause."""
        return [] if self._session is None else self._session.log.findings

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
        reduction = Reduction([trainer.strategy.model], num_ranks=_data_parallel_ranks(trainer))
        host = LightningHost(trainer, pl_module, self.settings, reduction)
        self._session = Session(self.settings, host, trainer.optimizers, reduction)
        self._session.start()

    @_guarded
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        num_examples = count_examples(batch)
        self._session.host.summary.num_examples = num_examples
        self._session.begin_microbatch(batch, num_examples)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        session = self._session
        if session is None:
            return
        window = session.window_of(optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer)
        if window is not None:
            session.boundary.reached(window)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._finish()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._finish()

    def _finish(self) -> None:
        if self._session is not None and self._session.active:
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

    def __init__(self, trainer: Trainer, pl_module: LightningModule, settings: Settings, reduction: Reduction) -> None:
        self._trainer, self._module, self._settings = trainer, pl_module, settings
        self._log = LightningLog(trainer)
        self.summary = Summary(self, reduction, show=trainer.is_global_zero)

    @property
    def divider(self) -> str:  # type: ignore[override]
        return f"Trainer(accumulate_grad_batches={self._trainer.accumulate_grad_batches})"

    def steps(self) -> int:
        return self._trainer.accumulate_grad_batches if self._module.automatic_optimization else 1

    def framework_divisor(self) -> int:
        return self.steps()

    def loss_scale(self) -> Tensor | None:
        return getattr(getattr(self._trainer.precision_plugin, "scaler", None), "_scale", None)

    def step_expected(self, optimizer: torch.optim.Optimizer) -> bool | None:
        return not self._trainer.fit_loop._should_accumulate() if self._module.automatic_optimization else None

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

    def should_log(self, optimizer_step: int) -> bool:
        every = self._settings.log_every_n_steps or self._trainer.log_every_n_steps
        return bool(every) and (optimizer_step + 1) % every == 0

    def announce(self, finding: Finding) -> None:
        self._log.finding(finding)

    def record(self, record: WindowRecord, log: bool) -> None:
        if log:
            self._log.metrics(record)


def _data_parallel_ranks(trainer: Trainer) -> int | None:
    """Ranks that get different examples, as the strategy tells its distributed sampler."""
    if trainer.world_size == 1:
        return None
    arguments = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
    return arguments.get("num_replicas", trainer.world_size)
