"""How long a learning-rate schedule is, in its own steps."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch.optim import lr_scheduler

#: Where schedules of other packages, and warm-up wrappers, keep their length.
LENGTH_NAMES = ("total_steps", "num_training_steps", "T_max", "max_steps", "max_iters", "max_epochs", "total_iters")
WARMUP_NAMES = ("num_warmup_steps", "warmup_steps", "warmup_epochs", "warmup_iters")


@dataclasses.dataclass(frozen=True)
class Horizon:
    """A schedule's length.

    Args:
        length: Steps until the schedule has run its course; ``None`` for one without an end.
        setting: The argument that sets it, in words a user knows (``CosineAnnealingLR(T_max=1000)``).
        warmup: Steps until the learning rate stops rising (0 for none).
    """

    length: int | None
    setting: str
    warmup: int = 0


def read_horizon(scheduler: Any) -> Horizon | None:
    """Read a schedule's length; ``None`` where it has neither an end nor a warm-up, or says nothing about it.

    Args:
        scheduler: A PyTorch scheduler, unwrapped.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> read_horizon(lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)).setting
        'CosineAnnealingLR(T_max=1000)'
    """
    for kind, read in _READERS.items():
        if isinstance(scheduler, kind):
            return read(scheduler)
    return _named(scheduler, vars(scheduler))


def _one_cycle(scheduler: Any) -> Horizon:
    return Horizon(int(scheduler.total_steps), _setting(scheduler, "total_steps", scheduler.total_steps))


def _cosine(scheduler: Any) -> Horizon:
    return Horizon(int(scheduler.T_max), _setting(scheduler, "T_max", scheduler.T_max))


def _linear(scheduler: Any) -> Horizon:
    setting = _setting(scheduler, "total_iters", scheduler.total_iters)
    if scheduler.end_factor < scheduler.start_factor:
        return Horizon(int(scheduler.total_iters), setting)
    return Horizon(None, setting, warmup=int(scheduler.total_iters))


def _polynomial(scheduler: Any) -> Horizon:
    return Horizon(int(scheduler.total_iters), _setting(scheduler, "total_iters", scheduler.total_iters))


def _constant(scheduler: Any) -> Horizon:
    warmup = int(scheduler.total_iters) if scheduler.factor < 1 else 0
    return Horizon(None, _setting(scheduler, "total_iters", scheduler.total_iters), warmup=warmup)


def _sequential(scheduler: Any) -> Horizon | None:
    first, last = read_horizon(scheduler._schedulers[0]), read_horizon(scheduler._schedulers[-1])
    milestones = [int(milestone) for milestone in scheduler._milestones]
    length = milestones[-1] + last.length if last is not None and last.length is not None else None
    warmup = milestones[0] if first is not None and first.warmup else 0
    parts = " then ".join(part.setting for part in (first, last) if part is not None)
    return Horizon(length, f"SequentialLR(milestones={milestones}: {parts})", warmup=warmup)


def _chained(scheduler: Any) -> Horizon | None:
    parts = [part for part in map(read_horizon, scheduler._schedulers) if part is not None]
    lengths = [part for part in parts if part.length is not None]
    longest = max(lengths, key=lambda part: part.length or 0, default=None)
    if longest is None:
        return max(parts, key=lambda part: part.warmup, default=None)
    return dataclasses.replace(longest, warmup=max(part.warmup for part in parts))


def _lambda(scheduler: Any) -> Horizon | None:
    function = next((function for function in scheduler.lr_lambdas if function is not None), None)
    return None if function is None else _named(scheduler, arguments_of(function))


def _endless(scheduler: Any) -> None:
    return None


def arguments_of(function: Callable[..., Any]) -> dict[str, Any]:
    """What a function was bound to: keywords of a ``functools.partial``, closure variables, attributes."""
    if isinstance(function, functools.partial):
        return {**arguments_of(function.func), **function.keywords}
    if inspect.isfunction(function):
        return dict(inspect.getclosurevars(function).nonlocals)
    return dict(getattr(function, "__dict__", {}))


def _named(scheduler: Any, values: dict[str, Any]) -> Horizon | None:
    warmup = _first(values, WARMUP_NAMES)
    found = _first(values, LENGTH_NAMES)
    if found is None and warmup is None:
        return None
    name, value = found or warmup  # type: ignore[misc]
    length = None if found is None else value
    return Horizon(length, _setting(scheduler, name, value), warmup=0 if warmup is None else warmup[1])


def _first(values: dict[str, Any], names: tuple[str, ...]) -> tuple[str, int] | None:
    found = [(name, values.get(name)) for name in names]
    numbers = [(name, v) for name, v in found if isinstance(v, (int, float)) and not isinstance(v, bool)]
    return next(((name, int(value)) for name, value in numbers if 0 < value < 2**53), None)


def _setting(scheduler: Any, name: str, value: Any) -> str:
    return f"{type(scheduler).__name__}({name}={value:.12g})"


_READERS: dict[type, Callable[[Any], Horizon | None]] = {
    lr_scheduler.OneCycleLR: _one_cycle,
    lr_scheduler.CosineAnnealingWarmRestarts: _endless,
    lr_scheduler.CosineAnnealingLR: _cosine,
    lr_scheduler.LinearLR: _linear,
    lr_scheduler.PolynomialLR: _polynomial,
    lr_scheduler.ConstantLR: _constant,
    lr_scheduler.SequentialLR: _sequential,
    lr_scheduler.ChainedScheduler: _chained,
    lr_scheduler.LambdaLR: _lambda,
    lr_scheduler.ReduceLROnPlateau: _endless,
}
