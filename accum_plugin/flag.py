"""The accelerate flag: what its value means, and the hook that it puts on every ``Accelerator``."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from accum_plugin.autoload import ENVIRONMENT_VARIABLE
from accum_plugin.settings import MODES, Settings

KEY = "accum_plugin"


def check(value: Any) -> Settings | None:
    """Read a flag's value as YAML or JSON gives it; ``None`` where it switches the plugin off.

    Raises:
        ValueError: If the value is not understood; the message quotes it and lists the choices.
    """
    return _settings(value, f"{KEY}: {value!r}")


def from_text(text: str) -> Settings | None:
    """Read a flag's value from an environment variable: a mode, a switch, or a JSON object.

    Raises:
        ValueError: If the text is not understood; the message quotes it and lists the choices.

    Example:
        >>> from_text('{"mode": "warn", "ignore": ["ACC301"]}').mode
        'warn'
        >>> from_text("off") is None
        True
    """
    quoted = f"{ENVIRONMENT_VARIABLE}={text!r}"
    if not text.lstrip().startswith("{"):
        return _settings(text.strip().lower(), quoted)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{quoted} is not JSON ({error}); choose from {', '.join(map(repr, MODES))}, 'off', "
            'or give a JSON object such as {"mode": "fix", "verify": true}'
        ) from error
    return _settings(value, quoted)


def _settings(value: Any, quoted: str) -> Settings | None:
    try:
        return Settings.from_flag(value)
    except (TypeError, ValueError) as error:
        # A TypeError for example where ignore is a number and not a list of codes.
        reason = str(error).removeprefix(f"{KEY}: ")
        raise ValueError(f"{quoted} is not understood: {reason}") from error


def to_text(value: Any) -> str:
    """Write a checked value for the environment variable; :func:`from_text` gives the same settings back."""
    if isinstance(value, str):
        return value
    return json.dumps(value)


def attach_to_every_accelerator(module: ModuleType) -> None:
    """Make every ``Accelerator`` carry a hook with the flag's settings, from the end of its ``__init__`` on.

    A value that is not understood leaves the class alone, and rank zero says so.

    Args:
        module: ``accelerate.accelerator``.
    """
    try:
        settings = from_text(os.environ[ENVIRONMENT_VARIABLE])
    except ValueError as error:
        _warn(f"{error}. The plugin is off; training goes on.")
        return
    if settings is not None:
        module.Accelerator.__init__ = _hooked(module.Accelerator.__init__, settings)


def _hooked(init: Callable[..., None], settings: Settings) -> Callable[..., None]:
    """Wrap ``Accelerator.__init__``, its signature kept, so that a hook is attached when it is done."""
    keywords = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        try:
            # Here and not above: the hook needs a finished accelerate, this module may meet a half imported one.
            from accum_plugin.accelerate import AccumulationHook

            if AccumulationHook.of(self) is None:
                AccumulationHook.attach(self, **keywords)
        except Exception as error:
            _warn(f"ACC902: the hook could not be attached ({error!r}). The plugin is off; training goes on.")

    return __init__


def _warn(message: str) -> None:
    """Warn on rank zero; where warnings are errors, write it down instead, since no import may fail over it."""
    if os.environ.get("RANK", "0") != "0":
        return
    try:
        # The caller is the import machinery: naming a line of it would help nobody.
        warnings.warn_explicit(message, RuntimeWarning, filename=KEY, lineno=1)
    except RuntimeWarning:
        print(f"{KEY}: {message}", file=sys.stderr)
