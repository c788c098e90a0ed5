"""Small Trainers on real data for the Lightning tests: one scalar weight, or a tiny network, step by step.

With the scalar weight the loss of example ``x`` is ``w * x``: the gradient *is* the weighted mean of the ``x``, so a
factor can be read off. Everything here can be sent to a rank of the pool.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from accum_plugin import Finding, WindowRecord
from accum_plugin.lightning import AccumulationCallback

QUIET = dict(
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    use_distributed_sampler=False,
)


class Scalar(nn.Module):
    """One weight: the loss of each example is ``w * x``."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def network(dtype: torch.dtype = torch.float64, num_classes: int = 4) -> nn.Module:
    """A two-layer classifier of 6 features, the same on every call."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, num_classes)).to(dtype)


def examples(num: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """``num`` examples of 6 features and their classes 0 to 3, the same on every call."""
    generator = torch.Generator().manual_seed(11)
    return torch.randn(num, 6, generator=generator, dtype=dtype), torch.randint(0, 4, (num,), generator=generator)


class Loop(L.LightningModule):
    """A module whose training step is a function.

    Args:
        model: What is trained.
        step: ``step(loop, batch, batch_idx)``, the training step; ``loop.model`` is the model.
        optimizers: ``optimizers(loop)``, what ``configure_optimizers`` returns; SGD by default.
        manual: Whether the step calls the optimizers itself.
        started: ``started(loop)``, called when training starts, before the callback sees it.
    """

    def __init__(
        self,
        model: nn.Module,
        step: Callable[..., Any],
        optimizers: Callable[[Loop], Any] | None = None,
        *,
        manual: bool = False,
        started: Callable[[Loop], None] | None = None,
    ) -> None:
        super().__init__()
        self.model, self.step, self.optimizers_of, self.started = model, step, optimizers, started
        self.automatic_optimization = not manual
        self.grads: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(self, batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return self.optimizers_of(self) if self.optimizers_of else torch.optim.SGD(self.parameters(), lr=0.125)

    def setup(self, stage: str) -> None:
        if self.started is not None:
            strategy = self.trainer.strategy
            original = strategy.setup

            def after_setup(trainer: Any) -> None:
                original(trainer)
                self.started(self)

            strategy.setup = after_setup

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.grads.append(torch.cat([_flat(p.grad, p) for p in parameters]))


def _flat(grad: Tensor | None, parameter: Tensor) -> Tensor:
    return (torch.zeros_like(parameter) if grad is None else grad.detach().clone()).reshape(-1)


@dataclasses.dataclass
class Run:
    """What came of a fit.

    Args:
        grads: Each optimizer step's gradient, flat, as the optimizer was about to see it (before clipping).
        weights: The weights after training, flat.
        findings: What the callback said.
        windows: The callback's window records.
        warned: The text of each Python warning of the plugin.
    """

    grads: list[Tensor]
    weights: Tensor
    findings: list[Finding]
    windows: list[WindowRecord]
    warned: list[str]

    def alarms(self) -> list[str]:
        """Codes of the findings that are more than worth knowing."""
        return [finding.code for finding in self.findings if finding.certainty != "info"]

    def finding(self, code: str) -> Finding:
        """The one finding of a code."""
        (found,) = [finding for finding in self.findings if finding.code == code]
        return found


def fit(
    step: Callable[..., Any],
    batches: Sequence[Any],
    *,
    K: int = 1,
    model: nn.Module | None = None,
    optimizers: Callable[[Loop], Any] | None = None,
    manual: bool = False,
    started: Callable[[Loop], None] | None = None,
    mode: str | None = "fix",
    keywords: dict[str, Any] | None = None,
    callback: AccumulationCallback | None = None,
    callbacks: Sequence[L.Callback] = (),
    **trainer: Any,
) -> Run:
    """Train on this process (or this rank) and return what happened.

    Args:
        step: The training step, see :class:`Loop`.
        batches: This rank's microbatches, in order.
        K: ``accumulate_grad_batches``.
        model: What is trained; one scalar weight by default.
        optimizers: See :class:`Loop`.
        manual: See :class:`Loop`.
        started: See :class:`Loop`.
        mode: The callback's mode; ``None`` leaves the callback out.
        keywords: Further keywords of the callback.
        callback: The callback itself, instead of a new one.
        callbacks: Further callbacks, after the plugin's.
        trainer: Further keywords of the Trainer.
    """
    torch.manual_seed(3)
    loop = Loop(Scalar() if model is None else model, step, optimizers, manual=manual, started=started)
    if callback is None and mode is not None:
        callback = AccumulationCallback(mode, **(keywords or {}))
    plugins = [] if callback is None else [callback]
    options = {**QUIET, "max_epochs": 1, "devices": 1, **trainer}
    if dist.is_initialized() and dist.get_world_size() > 1:
        options.update(devices=dist.get_world_size())
        options.setdefault("strategy", DDPStrategy(process_group_backend="gloo"))
    if not manual:
        options["accumulate_grad_batches"] = K
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("always")
        run = L.Trainer(callbacks=[*plugins, *callbacks], **options)
        run.fit(loop, torch.utils.data.DataLoader(list(batches), batch_size=None))
    weights = torch.cat([p.detach().reshape(-1) for p in loop.parameters()])
    said = [str(w.message) for w in caught if type(w.message).__name__ == "AccumulationWarning"]
    findings = list(callback.findings) if callback else []
    return Run(loop.grads, weights, findings, list(callback.windows) if callback else [], said)


def fits(rank: int, n: int, jobs: dict[str, dict[str, Any]], modes: Sequence[str | None]) -> dict[Any, Run]:
    """Run fits one after another on one rank; the result is keyed ``(name, mode)``.

    Args:
        rank: This rank.
        n: Ranks.
        jobs: Keywords of :func:`fit` by name, in which ``batches`` holds one list for each rank, ``model`` is a
            function that makes one, and ``fresh`` a function that makes further keywords.
        modes: Modes to run each in.
    """
    return {(name, mode): alone(mode=mode, **job, rank=rank) for name, job in jobs.items() for mode in modes}


def alone(*, batches: Sequence[Any], rank: int | None = None, model: Any = None, fresh: Any = None, **job: Any) -> Run:
    """Run one job as in :func:`fits`; without a rank, ``batches`` are this process's own."""
    own = batches if rank is None else batches[rank]
    return fit(batches=own, model=model() if model else None, **(fresh() if fresh else {}), **job)


def identical(one: Run, other: Run) -> bool:
    """Whether two runs had the same gradients and ended with the same weights, to the last bit."""
    same = len(one.grads) == len(other.grads) and all(map(_same, one.grads, other.grads))
    return same and _same(one.weights, other.weights)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


def numbers(first: int, last: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """``first .. last`` as a tensor, for the scalar weight."""
    return torch.arange(first, last + 1, dtype=dtype)
