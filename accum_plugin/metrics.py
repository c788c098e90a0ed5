"""Torchmetrics that hold a run's window numbers until they are logged."""

from __future__ import annotations

import math

import torch
from torchmetrics import Metric

from accum_plugin.record import WindowRecord


class WindowMetrics(Metric):
    """The latest window's numbers under their metric keys.

    The numbers are sums over all ranks already (they travel in the boundary's own small all-reduce), so every rank
    holds the same ones; computing them does not communicate.

    Example:
        >>> record = WindowRecord(0, 2, 12, 12.0, 1.0, 1.0, 1.0, 0.1, 0.5, 2)
        >>> metrics = WindowMetrics()
        >>> metrics.update(record)
        >>> metrics.compute()["accum/effective_batch"]
        12.0
    """

    full_state_update = False
    latest: torch.Tensor

    def __init__(self) -> None:
        super().__init__(sync_on_compute=False)
        self._keys: tuple[str, ...] = ()
        self.add_state("latest", torch.zeros(0, dtype=torch.float64), dist_reduce_fx=None)

    def update(self, record: WindowRecord) -> None:
        """Hold ``record``'s numbers."""
        values = record.metrics()
        self._keys = tuple(values)
        self.latest = torch.tensor(list(values.values()), dtype=torch.float64)

    def compute(self) -> dict[str, float]:
        """Return the held numbers by metric key; what is not a number is left out."""
        pairs = zip(self._keys, self.latest.tolist())
        return {key: value for key, value in pairs if not math.isnan(value)}
