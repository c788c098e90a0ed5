"""The demo's sections: one real Lightning fit without and one with the plugin, against the one-process gradient."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from accum_plugin.demo import networks
from accum_plugin.lightning import AccumulationCallback

STEPS = 3  # optimizer steps of every row of the table
ACCUMULATION = 4
LAST_WINDOW = 2  # microbatches left for the epoch's last window
TEXT_BATCH = 2  # small batches are the most ragged
TEXT_WINDOWS = 2


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What the optimizer applied, against the one-process full-batch gradient of the same examples.

    Args:
        factor: Best-fitting single factor, ``<g, reference> / <reference, reference>``.
        cosine: Cosine of the angle between the two.
        deviation: ``|g - reference| / |reference|``.
        norm: 2-norm of the gradient the optimizer applied.
        reference_norm: 2-norm of the one-process gradient.
    """

    factor: float
    cosine: float
    deviation: float
    norm: float
    reference_norm: float

    @classmethod
    def of(cls, gradient: Tensor, reference: Tensor) -> Measurement:
        """Compare two flat gradients."""
        dot, squared = gradient @ reference, reference @ reference
        return cls(
            factor=(dot / squared).item(),
            cosine=(dot / (gradient.norm() * squared.sqrt())).item(),
            deviation=((gradient - reference).norm() / squared.sqrt()).item(),
            norm=gradient.norm().item(),
            reference_norm=squared.sqrt().item(),
        )


def measure_all(n: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """Run every section on this rank; all ranks call it together and get the same measurements."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # the findings are shown beside the numbers instead
    rows = [_table_row(n, loss, reduction, progress) for loss in ("global", "local") for reduction in ("sum", "mean")]
    return {
        "ranks": n,
        "rows": rows,
        "incomplete_window": _incomplete_window(n, progress),
        "ragged_tokens": _ragged_tokens(n, progress),
    }


def _table_row(n: int, loss: str, reduction: str, progress: Callable[[str], None]) -> dict[str, Any]:
    progress(f"digits: loss divided over the {loss} batch, ranks combined by {reduction}")
    data = networks.digits(STEPS * networks.LOCAL_BATCH * n)

    def run(plugin: AccumulationCallback | None) -> Measurement:
        module = networks.DigitsNetwork(loss)
        return _fit(module, _loader(data), n=n, reduction=reduction, plugin=plugin)

    return {"loss": loss, "reduction": reduction, **_both(run)}


def _incomplete_window(n: int, progress: Callable[[str], None]) -> dict[str, Any]:
    progress(f"digits: {ACCUMULATION + LAST_WINDOW} microbatches in windows of {ACCUMULATION}")
    data = networks.digits((ACCUMULATION + LAST_WINDOW) * 8 * n)

    def run(plugin: AccumulationCallback | None) -> Measurement:
        module = networks.DigitsNetwork("local")
        return _fit(module, _loader(data, 8), n=n, accumulation=ACCUMULATION, plugin=plugin, window=-1)

    return {"accumulation": ACCUMULATION, "microbatches": LAST_WINDOW, **_both(run)}


def _ragged_tokens(n: int, progress: Callable[[str], None]) -> dict[str, Any]:
    progress("bytes of the standard library: padded sequences, a token mean on every rank")
    data = networks.paragraphs(TEXT_WINDOWS * 2 * TEXT_BATCH * n)

    def run(plugin: AccumulationCallback | None) -> Measurement:
        module = networks.ByteModel("local")
        loader = _loader(data, TEXT_BATCH, networks.next_byte_batch)
        return _fit(module, loader, n=n, accumulation=2, plugin=plugin)

    return {"accumulation": 2, **_both(run)}


def _both(run: Callable[[AccumulationCallback | None], Measurement]) -> dict[str, Any]:
    plugin = AccumulationCallback()
    without, with_plugin = run(None), run(plugin)
    return {
        "factor_without": without.factor,
        "factor_with": with_plugin.factor,
        "without": dataclasses.asdict(without),
        "with": dataclasses.asdict(with_plugin),
        "findings": [finding.to_dict() for finding in plugin.findings],
    }


def _loader(data: Any, batch: int = networks.LOCAL_BATCH, collate: Any = None) -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(data, batch_size=batch, collate_fn=collate)


def _fit(
    module: networks.RecordingModule,
    loader: torch.utils.data.DataLoader,
    *,
    n: int,
    plugin: AccumulationCallback | None,
    reduction: str = "mean",
    accumulation: int = 1,
    window: int | None = None,
) -> Measurement:
    """Train one epoch on this rank and measure one window, or all of them put end to end."""
    trainer = Trainer(
        accelerator="cpu",
        devices=n,
        strategy=DDPStrategy(process_group_backend="gloo"),
        plugins=[LightningEnvironment()],
        max_epochs=1,
        accumulate_grad_batches=accumulation,
        callbacks=[plugin] if plugin else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if reduction == "sum":
        module.on_train_start = lambda: _sum_over_ranks(trainer.strategy.model)
    trainer.fit(module, loader)
    steps = module.steps if window is None else [module.steps[window]]
    pairs = [(_flat(gradient), _reference(module, batches, weights)) for batches, weights, gradient in steps]
    return Measurement.of(*(torch.cat(side) for side in zip(*pairs, strict=True)))


def _sum_over_ranks(wrapped: torch.nn.parallel.DistributedDataParallel) -> None:
    """Register a communication hook that adds gradients up and does not divide, as some wrappers do."""

    def hook(group, bucket):  # DDP refuses annotations that are strings, as they are in this module
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    wrapped.register_comm_hook(None, hook)


def _reference(module: networks.RecordingModule, batches: list[Any], weights: list[Tensor]) -> Tensor:
    """Return the gradient of all ranks' examples as one batch, by plain autograd, at the step's weights."""
    windows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(windows, batches)
    for parameter, weight in zip(module.parameters(), weights, strict=True):
        parameter.data.copy_(weight)
    return _flat(torch.autograd.grad(module.reference_loss(windows), list(module.parameters())))


def _flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])
