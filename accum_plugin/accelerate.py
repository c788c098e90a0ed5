"""AccumulationHook: the session's Accelerate side. It translates an Accelerator's calls and holds no arithmetic."""

from __future__ import annotations

import collections
import contextlib
import gc
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, data_loader
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from accum_plugin.accelerate_facts import find_wrappers
from accum_plugin.accelerate_host import AccelerateHost, data_parallel_ranks, unwrap
from accum_plugin.drawn import Drawn
from accum_plugin.finding import Finding, FindingLog
from accum_plugin.host import count_examples
from accum_plugin.neighbors.configuration import contradictions, deepspeed_steps, engine_disagrees
from accum_plugin.record import WindowRecord
from accum_plugin.reduction import Reduction
from accum_plugin.rules.plugin import PluginDisabled
from accum_plugin.session import KEPT_WINDOWS, Session
from accum_plugin.settings import Settings
from accum_plugin.taps import InstanceTap, ModuleHook, Tap
from accum_plugin.transformers import forget, listen

_ATTRIBUTE = "_accum_plugin_hook"
STATE_FILE = "accum_plugin.json"


def _around_iter(
    listeners: Iterable[Any], original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    def batches() -> Iterator[Any]:
        for batch in original(*args, **kwargs):
            for listener in list(listeners):
                listener.drew(args[0], batch)
            yield batch
        for listener in list(listeners):
            listener.exhausted(args[0])

    return batches()


_LOADERS = (data_loader.DataLoaderShard, data_loader.DataLoaderDispatcher)
loader_taps = [Tap(kind, "__iter__", _around_iter) for kind in _LOADERS]


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
            kind = type(accelerator).__name__
            raise TypeError(f"attach() takes an Accelerator, not {kind}; for a Trainer give trainer.accelerator")
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
            InstanceTap(accelerator, "clip_grad_norm_", called=self._measuring_norm),
            InstanceTap(accelerator, "log", called=self._logging),
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
            if self.host.trainer is not None:
                self.host.trainer.resume(session.windows)
            for model in models:
                if id(model) not in self._forward_hooks:
                    hook = ModuleHook(self._forward)
                    self._forward_hooks[id(model)] = model.register_forward_pre_hook(hook, with_kwargs=True)
                    self.host.model_loss.follow(model)
            for finding in contradictions(models, session.reduction, self.host.steps(), self.host.divider):
                session.report(finding)

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

    def _measuring_norm(self, parameters: Any, max_norm: float, norm_type: float = 2) -> None:
        """A Trainer without clipping measures the norm all the same, and its callbacks look at the gradients then."""
        session, accelerator = self.session, self.accelerator
        ready = self.host.trainer is not None and accelerator.sync_gradients and accelerator.scaler is None
        if session is None or not ready or float(max_norm) < math.inf:
            return
        self.host.norm_follows = float(norm_type) == 2.0
        try:
            for window in session.windows:
                session.boundary.reached(window)
        finally:
            self.host.norm_follows = False

    def _logging(self, *args: Any, **kwargs: Any) -> None:
        with self.guard():
            self.host.join_row(*args, **kwargs)

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
            self.host.join_row()
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
