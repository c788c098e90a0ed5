"""FSDP2 on real ranks, through Lightning's ModelParallelStrategy: what is read, judged and corrected."""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning_loops import QUIET, examples, network
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F

from accum_plugin.lightning import AccumulationCallback

K, SIZES = 3, {"even": (5, 5), "ragged": (3, 7)}


class Sharded(L.LightningModule):
    """The small network, sharded layer by layer.

    Args:
        loss: ``"local"`` mean, or ``"global"``: the sum over this rank, divided by the count of all ranks.
        divisor: What the step divides by besides.
        factors: Divide factors of the inner layer and of the root; ``None`` leaves FSDP's own.
    """

    def __init__(self, loss: str, divisor: int, factors: tuple[float | None, float | None]) -> None:
        super().__init__()
        self.model, self.loss, self.divisor, self.factors = network(), loss, divisor, factors
        self.grads: list[torch.Tensor] = []

    def configure_model(self) -> None:
        if isinstance(self.model, FSDPModule):
            return
        mesh = self.device_mesh["data_parallel"]
        for unit, factor in zip((self.model[0], self.model), self.factors):
            fully_shard(unit, mesh=mesh)
            unit.set_force_sum_reduction_for_comms(True)  # gloo
            if factor is not None:
                unit.set_gradient_divide_factor(factor)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        logits = self.model(batch[0])
        if self.loss == "local":
            return F.cross_entropy(logits, batch[1]) / self.divisor
        count = torch.tensor(len(batch[1]))
        dist.all_reduce(count)
        return F.cross_entropy(logits, batch[1], reduction="sum") / count / self.divisor

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.grads.append(torch.cat([p.grad.full_tensor().reshape(-1) for p in self.parameters()]))


def train(rank: int, n: int, case: dict[str, Any]) -> dict[str, Any]:
    sizes = SIZES[case.get("sizes", "even")]
    batches = windows(sizes)
    module = Sharded(case.get("loss", "local"), case.get("divisor", 1), case.get("factors", (None, None)))
    callback = AccumulationCallback(**case.get("keywords", {}))
    strategy = ModelParallelStrategy(data_parallel_size=n, tensor_parallel_size=1, process_group_backend="gloo")
    keywords = {**QUIET, "devices": n, "max_epochs": 1, "accumulate_grad_batches": K}
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        trainer = L.Trainer(**keywords, strategy=strategy, callbacks=[callback])
        trainer.fit(module, torch.utils.data.DataLoader(batches[rank], batch_size=None))
    return {
        "grads": module.grads,
        "found": {f.code: f.factor for f in callback.findings if f.certainty != "info"},
        "evidence": {f.code: f.evidence for f in callback.findings},
        "scales": [window.gradient_scale for window in callback.windows],
    }


def windows(sizes: tuple[int, ...]) -> list[list[Any]]:
    """Each rank's microbatches: two whole windows and one that is incomplete."""
    features, labels = examples(sum(sizes) * (2 * K + 1))
    parts = [[] for _ in sizes]
    start = 0
    for _ in range(2 * K + 1):
        for rank, size in enumerate(sizes):
            parts[rank].append((features[start : start + size], labels[start : start + size]))
            start += size
    return parts


def meant(sizes: tuple[int, ...]) -> list[torch.Tensor]:
    """Gradient of each window's examples in one batch on one process."""
    features, labels = examples(sum(sizes) * (2 * K + 1))
    gradients = []
    for window in zip(features.split(K * sum(sizes)), labels.split(K * sum(sizes))):
        model = network()
        F.cross_entropy(model(window[0]), window[1]).backward()
        gradients.append(torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()]))
    return gradients


PARTIAL = {"ACC105": pytest.approx(1 / K)}
ADDED = {"factors": (1.0, 1.0)}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "averaged": ({}, PARTIAL),
    "divided twice": ({"divisor": K}, {"ACC103": pytest.approx(1 / K), **PARTIAL}),
    "local means added": (ADDED, {"ACC102": pytest.approx(2), **PARTIAL}),
    "torchtitan under accumulation": ({**ADDED, "loss": "global"}, PARTIAL),
    "global mean averaged": ({"loss": "global"}, {"ACC101": pytest.approx(1 / 2), **PARTIAL}),
    "ragged ranks": ({"sizes": "ragged"}, {"ACC107": None, **PARTIAL}),
    "rewritten": (
        {"loss": "global", "keywords": {"rewrite": "reduction"}},
        {"ACC101": pytest.approx(1 / 2), **PARTIAL},
    ),
}


def test_every_window_is_the_full_batch(ranks: Any) -> None:
    results = ranks(2, lambda rank, n: {name: train(rank, n, case) for name, (case, _) in CASES.items()})
    for result in results:
        for name, (case, found) in CASES.items():
            run = result[name]
            for seen, want in zip(run["grads"], meant(SIZES[case.get("sizes", "even")]), strict=True):
                torch.testing.assert_close(seen, want, rtol=1e-11, atol=1e-14, msg=lambda m, name=name: f"{name}: {m}")
            assert run["found"] == found, name
    assert results[0]["local means added"]["evidence"]["ACC102"] == "configuration"


def test_units_that_divide_differently_are_named(ranks: Any) -> None:
    for run in ranks(2, train, {"factors": (None, 1.0)}):
        assert "ACC110" in run["found"] and run["evidence"]["ACC110"] == "configuration"
