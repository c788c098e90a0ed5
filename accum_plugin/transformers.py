"""transformers' Trainer: metric keys and findings into its own logs, and what it says about its windows.

The hook sees only ``trainer.accelerator``. It learns whose that is when ``Trainer.train`` or ``Trainer.log`` is called;
both are tapped while a hook is attached, and only where transformers is imported already.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from accum_plugin.finding import Finding
from accum_plugin.loggers import append_finding, write_text
from accum_plugin.taps import Tap

if TYPE_CHECKING:
    from accum_plugin.accelerate import AccumulationHook
    from accum_plugin.window import OptimizerWindow

#: Attributes in which transformers' reporting callbacks keep a writer that takes text.
WRITERS = {
    "TensorBoardCallback": ("tensorboard", "tb_writer"),
    "WandbCallback": ("wandb", "_wandb"),
    "TrackioCallback": ("trackio", "_trackio"),
    "MLflowCallback": ("mlflow", "_ml_flow"),
}
_taps: list[Tap] = []


def listen(hook: AccumulationHook) -> None:
    """Let ``hook`` know when a Trainer that owns its Accelerator trains or logs."""
    module = sys.modules.get("transformers.trainer")
    if module is None or not hasattr(module, "Trainer"):
        return
    if not _taps:
        _taps.extend([Tap(module.Trainer, "train", _around_train), Tap(module.Trainer, "log", _around_log)])
    for tap in _taps:
        tap.add(hook)


def forget(hook: AccumulationHook) -> None:
    """Stop telling ``hook``."""
    for tap in _taps:
        tap.discard(hook)


def _around_train(
    listeners: Iterable[Any], original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    _owner(listeners, args[0])
    return original(*args, **kwargs)


def _around_log(
    listeners: Iterable[Any], original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    hook = _owner(listeners, args[0])
    if hook is None:
        return original(*args, **kwargs)
    logs = args[1] if len(args) > 1 else kwargs["logs"]
    with hook.guard():
        hook.host.trainer.add_metrics(logs)
    result = original(*args, **kwargs)
    with hook.guard():
        hook.host.trainer.write_findings()
    return result


def _owner(listeners: Iterable[Any], trainer: Any) -> AccumulationHook | None:
    """The hook on a Trainer's Accelerator, told whose it is."""
    hook = next((each for each in listeners if each.accelerator is trainer.accelerator), None)
    if hook is not None and hook.host.trainer is None:
        hook.host.trainer = TrainerSide(trainer, hook)
    return hook


class TrainerSide:
    """What a Trainer knows beyond its Accelerator: ``K``, when it logs, and where.

    Args:
        trainer: The Trainer.
        hook: The hook on its Accelerator.
    """

    def __init__(self, trainer: Any, hook: AccumulationHook) -> None:
        self._trainer = trainer
        self._hook = hook
        self._pending: list[Finding] = []

    @property
    def steps(self) -> int:
        """``K``, which the Trainer keeps to itself: its Accelerator is built with 1."""
        return self._trainer.args.gradient_accumulation_steps

    @property
    def divider(self) -> str:
        """Who accumulates, in words."""
        return f"TrainingArguments(gradient_accumulation_steps={self.steps})"

    def logs_after_this_step(self) -> bool:
        """Whether the Trainer logs its loss after the optimizer step at hand."""
        args, state = self._trainer.args, self._trainer.state
        strategy = str(getattr(args.logging_strategy, "value", args.logging_strategy))
        if strategy == "epoch":
            return self._hook.accelerator.gradient_state.end_of_dataloader
        step = state.global_step + 1
        every = max(int(state.logging_steps or args.logging_steps), 1)
        return strategy == "steps" and (step % every == 0 or step == 1 and args.logging_first_step)

    def resume(self, windows: Sequence[OptimizerWindow]) -> None:
        """Go on with the Trainer's own count of steps: its checkpoints hold no state of the hook."""
        for window in windows:
            if not window.steps_taken and self._trainer.state.global_step:
                window.load_state_dict({"steps_taken": self._trainer.state.global_step})

    # -- into the Trainer's logs ------------------------------------------------------------------------------------

    def keep(self, finding: Finding) -> None:
        """Keep a finding for the next time the Trainer logs."""
        self._pending.append(finding)

    def add_metrics(self, logs: dict[str, Any]) -> None:
        """Put the latest window's numbers beside the loss."""
        record = self._hook.last_window
        if "loss" in logs and record is not None:
            logs.update({key: value for key, value in record.metrics().items() if value == value})  # NaN: not read

    def write_findings(self) -> None:
        """Write new findings beside what was just logged, and to every reporter that takes text."""
        findings, self._pending = self._pending, []
        if not findings:
            return
        history = self._trainer.state.log_history
        if history:
            history[-1]["accum/findings"] = [finding.message for finding in findings]
        if self._trainer.is_world_process_zero():
            for finding in findings:
                self._report(finding)

    def _report(self, finding: Finding) -> None:
        step, args = self._trainer.state.global_step, self._trainer.args
        written = [
            write_text(name, getattr(callback, attribute, None), finding, step)
            for callback in self._trainer.callback_handler.callbacks
            for name, attribute in (WRITERS.get(type(callback).__name__, ("", "")),)
        ]
        if not any(written):
            append_finding(getattr(args, "logging_dir", None) or args.output_dir, finding)
