"""AccumulationHook: the session's Accelerate side. It translates an Accelerator's calls and holds no arithmetic."""

from __future__ import annotations

import collections
import contextlib
import gc
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, data_loader
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from accum_plugin.accelerate_facts import announcement, find_wrappers, loader_padding, schedules, skipped_by_bypass
from accum_plugin.drawn import Drawn
from accum_plugin.finding import Finding, FindingLog
from accum_plugin.host import Host, count_examples
from accum_plugin.forward_loss import ModelLoss
from accum_plugin.loggers import AccelerateLog
from accum_plugin.loss_graph import LossReading
from accum_plugin.neighbors import Announcement, Padding, Schedule
from accum_plugin.neighbors.configuration import deepspeed_steps, engine_disagrees, has_static_graph, static_graph
from accum_plugin.record import WindowRecord
from accum_plugin.reduction import Reduction
from accum_plugin.rules.plugin import PluginDisabled
from accum_plugin.session import KEPT_WINDOWS, Session
from accum_plugin.settings import Settings
from accum_plugin.summary import Summary
from accum_plugin.taps import InstanceTap, Tap
from accum_plugin.transformers import TrainerSide, forget, listen
from accum_plugin.untouched import unwrapped

_ATTRIBUTE = "_accum_plugin_hook"
STATE_FILE = "accum_plugin.json"


def _around_iter(listeners: Iterable[Any], original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def batches() -> Iterator[Any]:
        for batch in original(*args, **kwargs):
            for listener in list(listeners):
                listener.drew(args[0], batch)
            yield batch
        for listener in list(listeners):
            listener.exhausted(args[0])

    return batches()


loader_taps = [Tap(kind, "__iter__", _around_iter) for kind in (data_loader.DataLoaderShard, data_loader.DataLoaderDispatcher)]


class AccumulationHook:
    """Checks, and puts right, how a loop around an :class:`~accelerate.Accelerator` divides its gradients.

    Make one with :meth:`attach`. It logs the same metric keys as
    :class:`~accum_plugin.lightning.AccumulationCallback`, through ``accelerator.log``.
    """

    def __init__(self, accelerator: Accelerator, settings: Settings) -> None:
        self.accelerator = accelerator
        self.settings = settings
        self.log = FindingLog(settings.ignore)
        self.records: collections.deque[WindowRecord] = collections.deque(maxlen=KEPT_WINDOWS)
        self.session: Session | None = None
        self.host = AccelerateHost(self)
        self._taps: list[InstanceTap] = []
        self._handles: list[Any] = []
        self._forward_hooks: dict[int, Any] = {}
        self._wrappers: list[Any] = []
        self._drawn = Drawn(keep=settings.units is not None)
        self._saw_loader = False
        self._searched = False

    # -- what users call --------------------------------------------------------------------------------------------

    @classmethod
    def attach(
        cls,
        accelerator: Accelerator,
        mode: str = "fix",
        *,
        rewrite: str = "loss",
        normalization: str = "auto",
        units: Callable[[Any], int | Tensor] | None = None,
        verify: bool = False,
        ignore: Sequence[str] = (),
        log_every_n_steps: int | None = None,
    ) -> AccumulationHook:
        """Attach a hook to an Accelerator, before or after ``prepare()``; it replaces one that is there.

        Args:
            accelerator: The Accelerator whose loop to watch.
            mode: ``"fix"``, ``"warn"`` or ``"raise"``.
            rewrite: What a fix changes, ``"loss"`` or ``"reduction"``.
            normalization: ``"auto"``, ``"mean"`` or ``"sum"``.
            units: Units in a microbatch, called with a batch as the prepared loader yields it.
            verify: Run the one-step equivalence check in the first window.
            ignore: Rule codes to silence.
            log_every_n_steps: Optimizer steps between two log entries; ``None``: 10.

        Raises:
            ValueError: If a keyword has a value it cannot take.
            TypeError: If ``accelerator`` is no Accelerator, or ``units`` cannot be called.

        Example:
            >>> from accelerate import Accelerator
            >>> hook = AccumulationHook.attach(Accelerator(cpu=True), "warn")
            >>> hook.findings
            []
            >>> hook.detach()
        """
        if not isinstance(accelerator, Accelerator):
            raise TypeError(f"attach() takes an Accelerator, not {type(accelerator).__name__}; for a Trainer give trainer.accelerator")
        codes = (ignore,) if isinstance(ignore, str) else tuple(ignore)
        settings = Settings(mode, rewrite, normalization, units, verify, codes, log_every_n_steps)
        previous = cls.of(accelerator)
        if previous is not None:
            previous.detach()
        hook = cls(accelerator, settings)
        setattr(accelerator, _ATTRIBUTE, hook)
        hook._install()
        return hook

    @staticmethod
    def of(accelerator: Accelerator) -> AccumulationHook | None:
        """Return the hook on an Accelerator, however it got there, or ``None``."""
        return getattr(accelerator, _ATTRIBUTE, None)

    def detach(self) -> None:
        """Take everything off the Accelerator again; findings and windows stay readable."""
        self._end_session()
        for tap in reversed(self._taps):
            tap.remove()
        for handle in self._handles:
            handle.remove()
        for tap in loader_taps:
            tap.discard(self)
        forget(self)
        self.host.trainer = None
        self._taps, self._handles = [], []
        if self.of(self.accelerator) is self:
            delattr(self.accelerator, _ATTRIBUTE)

    @property
    def findings(self) -> list[Finding]:
        """What was found so far, one entry per code and cause; between epochs also what holds if training ends here."""
        if self.session is None or self.host.neighbors is None:
            return self.log.findings
        return [*self.log.findings, *self.host.neighbors.standing()]

    @property
    def windows(self) -> Sequence[WindowRecord]:
        """The latest accumulation windows, oldest first (bounded)."""
        return self.records

    @property
    def last_window(self) -> WindowRecord | None:
        """The window that ended last."""
        return self.records[-1] if self.records else None

    # -- the Accelerator's calls ------------------------------------------------------------------------------------

    def _install(self) -> None:
        accelerator = self.accelerator
        self._taps = [
            InstanceTap(accelerator, "prepare", after=self._prepared),
            InstanceTap(accelerator, "prepare_model", returned=self._wrapped),
            InstanceTap(accelerator, "accumulate", before=self._accumulating),
            InstanceTap(accelerator, "backward", before=self.host.enter_backward, after=self.host.leave_backward),
            InstanceTap(accelerator, "clip_grad_norm_", before=self._measuring_norm),
            InstanceTap(accelerator, "free_memory", before=self._free_memory),
            InstanceTap(accelerator, "end_training", before=self._end_session),
        ]
        for tap in loader_taps:
            tap.add(self)
        listen(self)
        self._handles = [
            accelerator.register_save_state_pre_hook(lambda models, weights, folder: self._save(folder)),
            accelerator.register_load_state_pre_hook(lambda models, folder: self._load(folder)),
        ]
        self._check_engine()
        self._wrappers = find_wrappers(accelerator)
        self._prepared()

    def _wrapped(self, model: Any) -> None:
        if isinstance(model, DistributedDataParallel) and not any(model is known for known in self._wrappers):
            self._wrappers.append(model)

    def _models(self) -> list[torch.nn.Module]:
        """The prepared models as the loop calls them, wrapped."""
        wrappers = {id(wrapper.module): wrapper for wrapper in self._wrappers}
        return [wrappers.get(id(model), model) for model in self.accelerator._models]

    def _check_engine(self) -> None:
        steps = self.accelerator.gradient_accumulation_steps
        engine_steps = deepspeed_steps(getattr(self.accelerator.state, "deepspeed_plugin", None))
        if engine_steps is not None and engine_steps != steps:
            finding = engine_disagrees(engine_steps, steps, self.host.divider)
            if self.log.add(finding):
                self.host.announce(finding)

    def _prepared(self) -> None:
        """Something was prepared: follow its models and optimizers too."""
        models = self._models()
        if not models:
            return
        if self.session is None:
            try:
                self._start(models)
            except Exception as error:  # nothing is installed yet that would have to be undone
                finding = PluginDisabled.finding(f"it could not start ({error!r}).", certainty="info")
                if self.log.add(finding):
                    self.host.announce(finding)
        session = self.session
        if session is None or session.failed is not None:
            return
        with session.guard():
            session.reduction.follow(models)
            for optimizer in self.accelerator._optimizers:
                session.watch(unwrap(optimizer))
            for model in models:
                if id(model) not in self._forward_hooks:
                    self._forward_hooks[id(model)] = model.register_forward_pre_hook(self._forward, with_kwargs=True)
                    self.host.model_loss.follow(model)
            if has_static_graph(models) and self.host.steps() > 1:
                session.report(static_graph(self.host.steps(), self.host.divider))

    def _start(self, models: list[torch.nn.Module]) -> None:
        reduction = Reduction(models, num_ranks=data_parallel_ranks(self.accelerator))
        session = Session(self.settings, self.host, (), reduction, log=self.log, records=self.records)
        session.start()
        self.session = session

    def _accumulating(self) -> None:
        session = self.session
        if session is not None and session.failed is None:
            self.host.explicit = True
            session.begin_microbatch(self.host.batch, self.host.num_examples)

    def _measuring_norm(self) -> None:
        """A Trainer without clipping measures the norm all the same, and its callbacks look at the gradients then."""
        session = self.session
        ready = self.host.trainer is not None and self.accelerator.sync_gradients and self.accelerator.scaler is None
        if session is not None and ready:
            for window in session.windows:
                session.boundary.reached(window)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Let no error of ours reach the run, whether a session is under way or not."""
        with self.session.guard() if self.session is not None else contextlib.suppress(Exception):
            yield

    def drew(self, loader: Any, batch: Any) -> None:
        """A prepared loader yields a batch."""
        session = self.session
        if session is None or session.failed is not None or loader not in self.accelerator._dataloaders:
            return
        with session.guard():
            if torch.is_grad_enabled() and self.accelerator._models and self.accelerator._models[0].training:
                self._saw_loader = True
                self.host.loader, self.host.num_batches = loader, self.host.num_batches + 1
                self.host.batch, self.host.num_examples = batch, count_examples(batch)
                self._drawn.add(batch, self.host.num_examples)
                if not self.host.explicit:
                    session.add_ticket(batch, self.host.num_examples)

    def exhausted(self, loader: Any) -> None:
        """A prepared loader has yielded its last batch, and the loop is through with it."""
        session = self.session
        if session is not None and session.failed is None and loader is self.host.loader:
            with session.guard():
                self.host.neighbors.epoch_ended()

    def _forward(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        session = self.session
        if session is None or session.failed is not None or not torch.is_grad_enabled():
            return
        with session.guard():
            self.find_unprepared()
            if not self._saw_loader:
                batch = kwargs or args
                session.note_batch(batch, count_examples(batch))
            elif (found := self._drawn.find(args, kwargs)) is not None:
                session.at_hand(*found)

    def find_unprepared(self) -> None:
        """Look once for optimizers of the prepared models' parameters that were never prepared."""
        session = self.session
        if self._searched or session is None:
            return
        self._searched = True
        parameters = {id(p) for model in self.accelerator._models for p in model.parameters() if p.requires_grad}
        watched = {id(p) for window in session.windows for p in window.parameters()}
        if parameters <= watched:
            return
        for found in gc.get_objects():
            # isinstance() would wake proxies
            if issubclass(type(found), torch.optim.Optimizer) and any(
                id(p) in parameters for group in found.param_groups for p in group["params"]
            ):
                self.host.unprepared.add(id(found))
                session.watch(found)

    def _free_memory(self) -> None:
        # called between two attempts at a batch size as well: only the end of an epoch is an end of training
        self._end_session(ended=self.host.neighbors is not None and self.host.neighbors.between_epochs)

    def _end_session(self, ended: bool = True) -> None:
        session, self.session = self.session, None
        if session is not None:
            if ended and session.failed is None and sys.exc_info()[0] is None:  # else an exception ends it
                with session.guard():
                    self.host.neighbors.finish()
            session.stop()
            self.host.loader = None
        self._wrappers = []
        for handle in self._forward_hooks.values():
            handle.remove()
        self.host.model_loss.forget()
        self._forward_hooks = {}
        self._saw_loader = self._searched = False

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Counters to go on with after a resume, and the effective batch they belong to."""
        return {} if self.session is None else self.session.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with saved counters."""
        if self.session is not None:
            self.session.load_state_dict(state)

    def _save(self, folder: str) -> None:
        if self.accelerator.is_main_process:
            Path(folder, STATE_FILE).write_text(json.dumps(self.state_dict()), encoding="utf-8")

    def _load(self, folder: str) -> None:
        path = Path(folder, STATE_FILE)
        if path.is_file():
            self.load_state_dict(json.loads(path.read_text(encoding="utf-8")))


class AccelerateHost(Host):
    """Answers the session's questions from the Accelerator.

    Args:
        hook: The hook it belongs to.
    """

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
        return optimizer_step == 0 or (optimizer_step + 1) % (self._hook.settings.log_every_n_steps or 10) == 0

    def announce(self, finding: Finding) -> None:
        if self.trainer is None:
            self._log.finding(finding)
        else:
            self._log.warn(finding)
            self.trainer.keep(finding)

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
