"""The keywords that the callback, the hook and the flag share, checked once."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

MODES = ("fix", "warn", "raise")
REWRITES = ("loss", "reduction")
NORMALIZATIONS = ("auto", "mean", "sum")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Checked keywords of :class:`AccumulationCallback` and :class:`AccumulationHook`.

    Args:
        mode: ``"fix"`` corrects what is certain and reports the rest, ``"warn"`` only reports,
            ``"raise"`` stops before the first wrong optimizer step.
        rewrite: What a fix changes: ``"loss"`` or ``"reduction"``.
        normalization: What the window's gradient is meant to be: ``"auto"``, ``"mean"``, ``"sum"``.
        units: ``Callable[[batch], int | Tensor]``, the units in a microbatch.
        verify: Whether to run the one-step equivalence check in the first window.
        ignore: Rule codes to silence.
        log_every_n_steps: Optimizer steps between two log entries; ``None`` takes the framework's.

    Raises:
        ValueError: If a keyword has a value it cannot take.
        TypeError: If ``units`` cannot be called.
    """

    mode: str = "fix"
    rewrite: str = "loss"
    normalization: str = "auto"
    units: Callable[[Any], Any] | None = None
    verify: bool = False
    ignore: tuple[str, ...] = ()
    log_every_n_steps: int | None = None

    def __post_init__(self) -> None:
        _check_choice("mode", self.mode, MODES)
        _check_choice("rewrite", self.rewrite, REWRITES)
        _check_choice("normalization", self.normalization, NORMALIZATIONS)
        if self.units is not None and not callable(self.units):
            raise TypeError(
                f"units={self.units!r} cannot be called; give a function of one batch that returns "
                "the number of units in it, for example units=lambda batch: batch[1].numel()"
            )
        if not isinstance(self.verify, bool):
            raise ValueError(f"verify={self.verify!r} is not a bool; give verify=True or verify=False")
        object.__setattr__(self, "ignore", _check_codes(self.ignore))
        every = self.log_every_n_steps
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ValueError(
                f"log_every_n_steps={every!r} is not a positive whole number; give the optimizer steps "
                "between two log entries, for example log_every_n_steps=50, or None"
            )

    @classmethod
    def from_flag(cls, value: Any) -> Settings | None:
        """Read the value of the ``accum_plugin`` key in an accelerate config file.

        Args:
            value: A mode (``"fix"``), a boolean, or a mapping of keywords.

        Returns:
            The settings, or ``None`` where the flag is off.

        Raises:
            ValueError: If the value is none of those; the message quotes it and lists the choices.
        """
        if value is None or value is False or value in ("off", "false", "no", "0", ""):
            return None
        if value is True or value in ("on", "true", "yes", "1"):
            return cls()
        if isinstance(value, str):
            if value not in MODES:
                raise ValueError(f"accum_plugin: {value!r} is not a mode; choose from {_listing(MODES)}, or off")
            return cls(mode=value)
        if isinstance(value, Mapping):
            known = {field.name for field in dataclasses.fields(cls)} - {"units"}
            for key in value:
                if key not in known:
                    raise ValueError(
                        f"accum_plugin: unknown key {key!r}{_closest(str(key), known)}; "
                        f"choose from {_listing(sorted(known))}"
                    )
            return cls(**{str(key): item for key, item in value.items()})
        raise ValueError(
            f"accum_plugin: {value!r} is neither a mode nor a mapping; choose from {_listing(MODES)}, "
            "or give a mapping such as {mode: fix, verify: true}"
        )


def _check_choice(keyword: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(
            f"{keyword}={value!r} is not a choice{_closest(str(value), choices)}; choose from {_listing(choices)}"
        )


def _check_codes(ignore: Iterable[str] | str) -> tuple[str, ...]:
    from accum_plugin.rules import RULES

    codes = (ignore,) if isinstance(ignore, str) else tuple(ignore)
    for code in codes:
        if code not in RULES:
            raise ValueError(
                f"ignore={code!r} is not a rule code{_closest(str(code), RULES)}; "
                "give codes such as ignore=('ACC301',); `accum-plugin rules` lists them"
            )
    return codes


def _listing(choices: Iterable[str]) -> str:
    return ", ".join(repr(choice) for choice in choices)


def _closest(value: str, choices: Iterable[str]) -> str:
    match = difflib.get_close_matches(value, list(choices), n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""
