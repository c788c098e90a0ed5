"""The short table at the start: effective batch, who divides, who combines."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from accum_plugin.host import Host
from accum_plugin.loss_graph import LossReading
from accum_plugin.reduction import Reduction


class Summary:
    """Prints one table, at the first backward pass.

    Args:
        host: The framework's side.
        reduction: How ranks are combined.
        show: Whether this rank prints.
    """

    def __init__(self, host: Host, reduction: Reduction, *, show: bool) -> None:
        self._host, self._reduction, self._show = host, reduction, show
        self.num_examples: int | None = None

    def show_once(self, reading: LossReading) -> None:
        """Print the table, the first time it is called."""
        if self._show:
            self._show = False
            Console(stderr=True).print(self._table(reading))

    def _table(self, reading: LossReading) -> Table:
        steps, ranks = self._host.steps(), self._reduction.num_ranks
        size = self.num_examples
        batch = f"{size} x {steps} x {ranks} = {size * steps * ranks}" if size else f"? x {steps} x {ranks}"
        table = Table(title="accum_plugin", show_header=False, title_justify="left")
        table.add_column()
        table.add_column(overflow="fold")  # a setting is a long word: break it rather than cut it off
        table.add_row("microbatch x accumulation x ranks = effective batch", batch)
        table.add_row("loss is normalized by", describe_loss(reading))
        table.add_row("divided for accumulation by", self._host.divider if steps > 1 else "nobody (1 step)")
        table.add_row("ranks are combined by", self._reduction.describe())
        return table


def describe_loss(reading: LossReading) -> str:
    """Say in plain words how a loss is normalized.

    Args:
        reading: What :func:`~accum_plugin.loss_graph.read_loss` found.
    """
    if reading.unreadable:
        return f"unknown: {reading.unreadable}"
    parts = []
    for term in reading.terms:
        scales = "".join(f" {'/' if scale.divides else '*'} {_short(scale.value)}" for scale in reversed(term.scales))
        parts.append(f"{term.reduction}{scales}")
    return " + ".join(parts) or "nothing that needs a gradient"


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else "a count on the device"
