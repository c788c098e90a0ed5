"""Where the plugin listens in PyTorch: backward passes, gradient norms for clipping, optimizer and scheduler steps.

Every tap forwards the call unchanged, keeps the function's name and signature, and goes away with its last listener.
"""

from __future__ import annotations

import functools
import logging
import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.utils.clip_grad as clip_grad
from torch import Tensor

Function = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Tap:
    """Replaces one function of a module while somebody listens, and puts it back afterwards.

    Args:
        owner: Module that holds the function.
        name: The function's name in it.
        around: ``around(listeners, original, args, kwargs)``, what runs instead.
    """

    def __init__(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        self._owner, self._name, self._around = owner, name, around
        self._original: Callable[..., Any] | None = None
        self._replacement: Callable[..., Any] | None = None
        # Weak, and in the same order on every rank: an Accelerator that is thrown away takes its hook along.
        self.listeners: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()

    def add(self, listener: Any) -> None:
        """Start telling ``listener`` about calls."""
        self.listeners[listener] = None
        if self._original is None:
            self._install()

    def discard(self, listener: Any) -> None:
        """Stop telling ``listener``; with the last one the original function is back in place."""
        self.listeners.pop(listener, None)
        if not self.listeners and self._original is not None:
            if getattr(self._owner, self._name) is self._replacement:  # else someone else wrapped ours: leave it
                setattr(self._owner, self._name, self._original)
                self._original = self._replacement = None

    @property
    def original(self) -> Callable[..., Any]:
        """The function itself, untapped."""
        return self._original or getattr(self._owner, self._name)

    def _install(self) -> None:
        original = getattr(self._owner, self._name)

        @functools.wraps(original)
        def tapped(*args: Any, **kwargs: Any) -> Any:
            if not self.listeners:
                return original(*args, **kwargs)
            return self._around(self.listeners, original, args, kwargs)

        self._original, self._replacement = original, tapped
        setattr(self._owner, self._name, tapped)


_depth = 0  # checkpointing runs backward inside backward: only the outermost belongs to a loss


def _around_backward(listeners: Iterable[Any], original: Function, args: Args, kwargs: Kwargs) -> Any:
    global _depth
    loss = args[0] if args else kwargs.get("tensors")
    gradient = args[1] if len(args) > 1 else kwargs.get("grad_tensors")
    if _depth or not isinstance(loss, Tensor):
        return original(*args, **kwargs)
    told = list(listeners)
    for listener in told:
        listener.before_backward(loss, gradient)
    _depth += 1
    try:
        result = original(*args, **kwargs)
    finally:
        _depth -= 1
    for listener in told:
        listener.after_backward(loss)
    return result


def _around_norm(listeners: Iterable[Any], original: Function, args: Args, kwargs: Kwargs) -> Any:
    grads = args[0] if args else kwargs.get("tensors", ())
    grads = [grads] if isinstance(grads, Tensor) else list(grads)
    norm = original(grads, *args[1:], **{k: v for k, v in kwargs.items() if k != "tensors"})
    norm_type = args[1] if len(args) > 1 else kwargs.get("norm_type", 2.0)
    for listener in list(listeners):
        listener.after_norm(grads, norm, float(norm_type))
    return norm


def _around_clip(listeners: Iterable[Any], original: Function, args: Args, kwargs: Kwargs) -> Any:
    named = dict(zip(("parameters", "max_norm", "total_norm", "foreach"), args)) | kwargs
    parameters = named["parameters"]
    named["parameters"] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if float(named["max_norm"]) < math.inf:  # else the norm is only measured
        grads = [p.grad for p in named["parameters"] if p.grad is not None]
        for listener in list(listeners):
            listener.before_clip(grads, float(named["max_norm"]), named["total_norm"])
    return original(**named)


def _around_clip_value(listeners: Iterable[Any], original: Function, args: Args, kwargs: Kwargs) -> Any:
    named = dict(zip(("parameters", "clip_value", "foreach"), args)) | kwargs
    parameters = named["parameters"]
    named["parameters"] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    for listener in list(listeners):
        grads = [p.grad for p in named["parameters"] if p.grad is not None]
        listener.before_clip(grads, float(named["clip_value"]), None)
    return original(**named)


def _around_scale(listeners: Iterable[Any], original: Function, args: Args, kwargs: Kwargs) -> Any:
    result = original(*args, **kwargs)
    for listener in list(listeners):
        listener.scaling(args[0])
    return result


def _around_scaler_step(listeners: Iterable[Any], original: Function, args: Args, kwargs: Kwargs) -> Any:
    result = original(*args, **kwargs)
    for listener in list(listeners):
        listener.scaler_stepped(args[0], args[1] if len(args) > 1 else kwargs["optimizer"])
    return result


def _around_update(listeners: Iterable[Any], original: Function, args: Args, kwargs: Kwargs) -> Any:
    for listener in list(listeners):
        listener.updating(args[0])
    return original(*args, **kwargs)


backward_tap = Tap(torch.autograd, "backward", _around_backward)
# clip_grad_norm_ looks these names up in its module at call time, so a `from ... import clip_grad_norm_` is seen too
norm_tap = Tap(clip_grad, "_get_total_norm", _around_norm)
clip_taps = (
    Tap(clip_grad, "_clip_grads_with_norm_", _around_clip),
    Tap(torch.nn.utils, "clip_grads_with_norm_", _around_clip),
    Tap(torch.nn.utils, "clip_grad_value_", _around_clip_value),
)
scaler_taps = (
    Tap(torch.amp.GradScaler, "scale", _around_scale),
    Tap(torch.amp.GradScaler, "step", _around_scaler_step),
    Tap(torch.amp.GradScaler, "update", _around_update),
)


class OptimizerTap:
    """Listens to one optimizer's steps and clearings.

    Args:
        optimizer: The PyTorch optimizer itself, not a framework's wrapper.
        listener: Has ``before_step(optimizer, closure)``, ``after_step(optimizer)``, ``on_zero_grad(optimizer)``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, listener: Any) -> None:
        def before(opt: torch.optim.Optimizer, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
            by_name = "closure" in kwargs  # PyTorch hands the optimizer itself over as args[0]
            closure = kwargs["closure"] if by_name else args[1] if len(args) > 1 else None
            told = listener.before_step(opt, closure if callable(closure) else None)
            if told is None or told is closure:
                return None
            return (args, {**kwargs, "closure": told}) if by_name else ((args[0], told, *args[2:]), kwargs)

        self._handles = [
            optimizer.register_step_pre_hook(before),
            optimizer.register_step_post_hook(lambda opt, args, kwargs: listener.after_step(opt)),
        ]
        self._zero_grad = InstanceTap(optimizer, "zero_grad", before=lambda: listener.on_zero_grad(optimizer))

    def remove(self) -> None:
        """Take the hooks off the optimizer."""
        for handle in self._handles:
            handle.remove()
        self._zero_grad.remove()


class InstanceTap:
    """Wraps one method of one object; pickling and copying the object see nothing of it.

    Args:
        owner: The object.
        name: The method's name.
        before: Called before each call, without arguments.
        called: Called before each call, with its arguments.
        after: Called after each call, without arguments.
        returned: Called with what each call returns.
    """

    def __init__(
        self,
        owner: Any,
        name: str,
        *,
        before: Callable[[], None] | None = None,
        called: Callable[..., None] | None = None,
        after: Callable[[], None] | None = None,
        returned: Callable[[Any], None] | None = None,
    ) -> None:
        self._owner, self._name = owner, name
        self._previous = vars(owner).get(name)
        self._tapped = _Tapped(getattr(owner, name), before, called, after, returned)
        setattr(owner, name, self._tapped)

    def remove(self) -> None:
        """Put the method back, unless someone else has replaced it since."""
        self._tapped.silence()
        if vars(self._owner).get(self._name) is not self._tapped:
            return
        if self._previous is None:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._previous)


class ModuleHook:
    """A module's hook that stays behind when the module is copied or pickled: there, it is a call that does nothing.

    What it becomes is the standard library's, so that a saved model loads where this package is not installed.

    Args:
        function: The hook itself.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (logging.getLogger("accum_plugin"), "debug")


class _Tapped:
    """A callable that forwards, tells, and pickles as the method it stands for."""

    def __init__(
        self,
        method: Callable[..., Any],
        before: Callable[[], None] | None,
        called: Callable[..., None] | None,
        after: Callable[[], None] | None,
        returned: Callable[[Any], None] | None,
    ) -> None:
        functools.update_wrapper(self, method)
        self._method, self._before, self._called = method, before, called
        self._after, self._returned = after, returned

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._before is not None:
            self._before()
        if self._called is not None:
            self._called(*args, **kwargs)
        result = self._method(*args, **kwargs)
        if self._after is not None:
            self._after()
        if self._returned is not None:
            self._returned(result)
        return result

    def silence(self) -> None:
        self._before = self._called = self._after = self._returned = None

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._method.__self__, self._method.__name__)  # type: ignore[attr-defined]
