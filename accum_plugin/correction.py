"""What the plugin multiplies: each microbatch before backward, and the window's gradient at the boundary."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from torch import Tensor

from accum_plugin.ledger import TermAccount, Totals
from accum_plugin.loss_graph import LossReading, Number
from accum_plugin.normalization import TermView, close

ROUNDING = 1e-6  # counts that are sums of weights, not whole, are equal up to this


class Correction:
    """Scales microbatches so that every unit of a term carries the same weight.

    A mean over ``N`` units is scaled by ``N / reference``; a sum with a divisor that differs between ranks or
    microbatches by ``reference / w``. The reference is the same on all ranks, so one factor at the boundary is
    enough to make every weight ``1 / N``. Microbatches of the reference's own size are not touched.

    Args:
        enabled: Whether to multiply anything at all (``mode="fix"``).
        equalizes: Whether to give all units the same weight; else a mean of means is what the user wants.
    """

    def __init__(self, enabled: bool, *, equalizes: bool = True) -> None:
        self.enabled = enabled
        self._equalizes = equalizes
        self.agreed = False
        self.mixed = False  # terms of one loss count different units, in changing proportions
        self.agreed_keys: set[str] = set()
        self._held: set[str] = set()  # sums whose reference all ranks share
        self._choices: set[str] = set()  # sums whose normalizer proved to be no count
        self.references: dict[str, float] = {}
        self._handles: list[Any] = []

    @property
    def needs_agreement(self) -> bool:
        """Whether ranks compare counts before their gradients are combined: once, or always where terms differ."""
        return self.enabled and self._equalizes and (not self.agreed or self.mixed)

    def before_backward(self, loss: Tensor, reading: LossReading, views: Sequence[TermView]) -> tuple[Number, ...]:
        """Install this microbatch's factors on the loss graph; return them, one for each term."""
        if not self.enabled:
            return (1.0,) * len(views)
        factors = self._factors(views)
        self.scale_terms(loss, reading, factors)
        return factors

    def scale_terms(self, loss: Tensor, reading: LossReading, factors: Sequence[Number]) -> None:
        """Multiply the gradient of each term of the coming backward pass by its factor."""
        for index, factor in enumerate(factors):
            if isinstance(factor, Tensor) or factor != 1.0:
                if index < len(reading.terms):
                    term = reading.terms[index]
                    self._handles.append(term.node.register_prehook(_scaler(term.output_nr, factor)))
                else:
                    self._handles.append(loss.register_hook(lambda grad, factor=factor: grad * factor))

    def forget_hooks(self) -> None:
        """Take the factors off the graph again: it may be kept and used once more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def agree(self, views: dict[str, TermView], totals: dict[str, Totals], num_microbatches: float) -> dict[str, float]:
        """Set the references that all ranks share; return each changed term's factor from its old to the new one.

        Where all weights are equal the local references are shared already and nothing changes, to the last bit.
        """
        self.agreed = True
        self.mixed = self.mixed or _go_apart([t for key, t in totals.items() if views[key].kind == "mean"])
        factors: dict[str, float] = {}
        for key, total in totals.items():
            self.agreed_keys.add(key)
            if views[key].kind == "mean" and (self.mixed or not total.even):
                shared = total.units / max(num_microbatches, 1.0)
                if key in self.references:
                    factors[key] = self.references[key] / shared
                self.references[key] = shared
            elif views[key].kind == "sum" and key in self.references and not total.even:
                shared = total.weighted / total.units
                factors[key] = shared / self.references[key]
                self.references[key] = shared
        return factors

    def settle(self, views: dict[str, TermView], totals: dict[str, Totals], num_microbatches: float) -> None:
        """After a window: share the references of terms that are new, and note terms whose units go apart.

        One factor at the boundary cannot serve two terms whose counts change in different proportions. Their
        references then follow the windows, so that the factor stays near 1 and each term keeps its size.
        """
        if not self._equalizes:
            return
        means = {key: total for key, total in totals.items() if views[key].kind == "mean"}
        self.mixed = self.mixed or _go_apart(list(means.values()))
        new = {key: total for key, total in totals.items() if key not in self.agreed_keys}
        if self.mixed or new:
            self.agree(views, means if self.mixed else new, num_microbatches)

    def release(self, accounts: Mapping[str, TermAccount], kept: Container[str], *, alone: bool) -> None:
        """Let the first microbatch of the next window be the reference, which leaves it untouched.

        Args:
            accounts: The terms of the window that ended. A count on an accelerator stays what it was: reading it
                would wait for the device.
            kept: Terms whose window goes on for another optimizer.
            alone: Whether this is the only process; means over several share a reference that stays.
        """
        for key, account in accounts.items():
            local = account.view.kind == "sum" and key not in self._held
            local = local or account.view.kind == "mean" and alone and not self.mixed
            if local and key not in kept and not isinstance(account.view.num_units, Tensor):
                self.references.pop(key, None)

    def equalize(self, key: str, weight: float) -> None:
        """From now on give every unit of a sum the weight ``weight``: its divisor differs between ranks."""
        self.references.setdefault(key, weight)
        self._held.add(key)

    def leave(self, key: str) -> None:
        """From now on let a sum be: its normalizer is a choice, not a count."""
        self._choices.add(key)

    def _factors(self, views: Sequence[TermView]) -> tuple[Number, ...]:
        """Each term's factor; a term without units of its own keeps its size beside the first that has some."""
        factors: list[Number] = [self._factor(view, views[0]) for view in views]
        if len(views) == 1:
            return (factors[0],)
        main = next((i for i, view in enumerate(views) if view.kind == "mean"), None)
        for index, view in enumerate(views):
            if main is not None and view.kind in ("penalty", "coupled"):
                divided = view.framework != 1.0  # once: what the main term was divided by besides is corrected for both
                factors[index] = factors[main] * (escaped(view, views[main]) if divided else 1.0)
        return tuple(factors)

    def _factor(self, view: TermView, main: TermView) -> Number:
        units = view.num_units
        if view.kind == "sum":
            counts = view.counts and self._equalizes and view.key not in self._choices
            if not view.weight or not counts and view.key not in self._held:
                return 1.0
            return self.references.setdefault(view.key, float(view.weight)) / view.weight
        if view.kind != "mean" or not self._equalizes:
            return 1.0
        if view.key not in self.references and (isinstance(units, Tensor) or units > 0):
            self.references[view.key] = float(units)
        reference = self.references.get(view.key, 1.0)
        factor = units / reference if isinstance(units, Tensor) or units > 0 else 0.0
        if not isinstance(factor, Tensor) and abs(factor - 1.0) < ROUNDING and (units % 1 or reference % 1):
            factor = 1.0
        return factor * escaped(view, main)


def _go_apart(totals: list[Totals]) -> bool:
    """Whether terms are uneven in different ways: ``Q N / A^2`` is the same for counts in fixed proportions."""
    shapes = [total.squares * total.units / total.weighted**2 for total in totals if total.weighted]
    return len(shapes) > 1 and max(shapes) > min(shapes) * (1 + 1e-9)


def escaped(view: TermView, main: TermView) -> float:
    """What an auxiliary term lacks of the divisions that the main term's own code gets (1.0: nothing)."""
    if view is main or main.kind != "mean" or view.user_power or view.ranks_power:
        return 1.0
    lack = main.counted / view.counted
    written = any(not isinstance(x, Tensor) and close(x, lack) for x in view.loose)  # as a convention: half an mse
    return 1.0 if written else lack


def _scaler(output_nr: int, factor: Number) -> Any:
    def scale(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(
            grad * factor if index == output_nr and grad is not None else grad for index, grad in enumerate(grads)
        )

    return scale
