"""What an Accelerator answers to the session, and what it is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import Tensor

from accum_plugin.accelerate_facts import announcement, loader_padding, schedules, skipped_by_bypass
from accum_plugin.equivalence.untouched import unwrapped
from accum_plugin.finding import Finding
from accum_plugin.forward_loss import ModelLoss
from accum_plugin.host import Host
from accum_plugin.loggers import AccelerateLog
from accum_plugin.loss_graph import LossReading
from accum_plugin.neighbors import Announcement, Padding, Schedule
from accum_plugin.record import WindowRecord
from accum_plugin.summary import Summary
from accum_plugin.transformers import TrainerSide

if TYPE_CHECKING:
    from accum_plugin.accelerate import AccumulationHook


class AccelerateHost(Host):
    """Answers the session's questions from the Accelerator.

    Args:
        hook: The hook it belongs to.
    """

    replays_whole = False  # a loop's own arithmetic on the model's loss cannot be run again

    def __init__(self, hook: AccumulationHook) -> None:
        self._hook = hook
        self._log = AccelerateLog(hook.accelerator)
        self._summary: Summary | None = None
        self._in_backward = False
        self.explicit = False
        self.batch: Any = None
        self.num_examples: int | None = None
        self.unprepared: set[int] = set()
        self.model_loss = ModelLoss()
        self.loader: Any = None
        self.num_batches = 0
        self.trainer: TrainerSide | None = None
        self.norm_follows = False  # the norm is about to be computed, after the boundary

    @property
    def _accelerator(self) -> Accelerator:
        return self._hook.accelerator

    @property
    def divider(self) -> str:  # type: ignore[override]
        if self.trainer is not None:
            return self.trainer.divider
        return f"Accelerator(gradient_accumulation_steps={self._accelerator.gradient_accumulation_steps})"

    def enter_backward(self) -> None:
        """``accelerator.backward`` was called: what follows is divided by it."""
        self._in_backward = True

    def leave_backward(self) -> None:
        """``accelerator.backward`` has returned."""
        self._in_backward = False

    @property
    def bypassed(self) -> bool:
        """Whether the backward pass that runs is the loop's own, not ``accelerator.backward``."""
        return not self._in_backward

    def steps(self) -> int:
        return self._accelerator.gradient_accumulation_steps if self.trainer is None else self.trainer.steps

    def framework_divisor(self) -> int:
        divides = self._in_backward and self._accelerator.distributed_type != DistributedType.DEEPSPEED
        return self._accelerator.gradient_accumulation_steps if divides else 1

    def loss_scale(self) -> Tensor | None:
        scale = getattr(self._accelerator.scaler, "_scale", None) if self._in_backward or self._closing else None
        return super().loss_scale() if scale is None else scale

    @property
    def _closing(self) -> bool:
        return self._accelerator.scaler is not None

    def step_expected(self, optimizer: torch.optim.Optimizer) -> bool | None:
        return self._accelerator.sync_gradients if self.explicit or self.trainer is not None else None

    def steps_at_the_end(self) -> bool:
        return self.trainer is not None

    def will_clip(self, optimizer: torch.optim.Optimizer) -> bool:
        return self.norm_follows

    def step_skipped(self, optimizer: torch.optim.Optimizer) -> bool:
        wrapped = next((o for o in self._accelerator._optimizers if unwrap(o) is optimizer), None)
        return bool(wrapped is not None and getattr(wrapped, "step_was_skipped", False))

    def loss_function(self) -> Callable[[Any], Any] | None:
        return self.model_loss.of_batch

    def replay(self, batch: Any) -> tuple[Callable[[Any], Any], Any] | None:
        return self.model_loss.replay()

    def modules(self) -> list[torch.nn.Module]:
        return [unwrapped(model) for model in self._accelerator._models]

    def announcement(self, optimizer: torch.optim.Optimizer) -> Announcement | None:
        prepared = any(unwrap(each) is optimizer for each in self._accelerator._optimizers)
        return announcement(self._accelerator, self.explicit, prepared, self.num_batches)

    def at_end_of_data(self) -> bool:
        return self._accelerator.gradient_state.end_of_dataloader

    def padding(self) -> Padding | None:
        return None if self.loader is None else loader_padding(self.loader)

    def skipped_by_bypass(self) -> tuple[str, ...]:
        return skipped_by_bypass(self._accelerator, self.explicit, super().loss_scale() is not None)

    def combines_on_purpose(self) -> bool:
        return bool(self._accelerator.gradient_state.plugin_kwargs.get("sync_each_batch"))

    def schedules(self) -> list[Schedule]:
        return schedules(self._accelerator)

    def before_backward(self, loss: Tensor, reading: LossReading) -> None:
        super().before_backward(loss, reading)
        session = self._hook.session
        if session is None:
            return
        if self._summary is None:
            self._summary = Summary(self, session.reduction, show=self._accelerator.is_main_process)
            self._summary.num_examples = session.num_examples
            self._summary.show_once(reading)

    def should_log(self, optimizer_step: int) -> bool:
        if self.trainer is not None:
            return self.trainer.logs_after_this_step()
        session = self._hook.session
        # Counted from the resume: a rank that cannot see the main one's disk has no saved counters, and must agree.
        optimizer_step -= 0 if session is None or not session.windows else session.windows[0].resumed_at
        return optimizer_step == 0 or (optimizer_step + 1) % (self._hook.settings.log_every_n_steps or 10) == 0

    def announce(self, finding: Finding) -> None:
        if self.trainer is None:
            self._log.finding(finding)
        else:
            self._log.warn(finding)
            self.trainer.keep(finding)

    def join_row(self, *args: Any, **kwargs: Any) -> None:
        """The loop calls ``accelerator.log``, or logs no more."""
        self._log.join_row(*args, **kwargs)

    def record(self, record: WindowRecord, log: bool) -> None:
        if log:
            self._log.metrics(record)


def unwrap(optimizer: Any) -> torch.optim.Optimizer:
    """The PyTorch optimizer inside a prepared one."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def data_parallel_ranks(accelerator: Accelerator) -> int | None:
    """Ranks that see different examples: the mesh's data-parallel axes where there is one, else all processes."""
    config = getattr(accelerator, "parallelism_config", None)
    if config is not None:
        return config.dp_replicate_size * config.dp_shard_size
    return None if accelerator.num_processes == 1 else accelerator.num_processes
