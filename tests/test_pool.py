"""The pool of ranks itself: collectives, both frameworks, and failures that it survives."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from pool import RankError


def _sum_of_ranks(rank, n, offset=0):
    total = torch.tensor([rank + offset], dtype=torch.float64)
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total.item()


def _lightning_fit(rank, n):
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy

    class Scalar(LightningModule):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))

        def training_step(self, batch, _):
            return (self.w * batch).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1.0)

    rows = torch.arange(1, 17, dtype=torch.float64)
    module = Scalar()
    trainer = Trainer(
        accelerator="cpu",
        devices=n,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_steps=1,
        logger=False,
        barebones=True,
    )
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=16 // n))
    return trainer.world_size, -module.w.item()


def _accelerate_loop(rank, n):
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    model.weight.data.zero_()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    rows = torch.arange(1, 17, dtype=torch.float64).reshape(-1, 1)[rank::n]
    accelerator.backward(model(rows).mean())
    optimizer.step()
    return accelerator.num_processes, str(accelerator.distributed_type), -accelerator.unwrap_model(model).weight.item()


def _one_rank_raises(rank, n):
    if rank == 1:
        raise KeyError("rank one has no batch")
    dist.all_reduce(torch.zeros(1))


def _one_rank_hangs(rank, n):
    if rank == 1:
        time.sleep(600)


def _one_rank_dies(rank, n):
    if rank == 1:
        os._exit(3)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_all_reduce(ranks, n):
    assert ranks(n, _sum_of_ranks, offset=1) == [(rank, n, n * (n + 1) / 2) for rank in range(n)]


@pytest.mark.parametrize("n", [2, 3])
def test_a_closure_and_tensors_travel(ranks, n):
    weights = torch.ones(3)
    results = ranks(n, lambda rank, n: weights * rank)
    assert [result.tolist() for result in results] == [[rank] * 3 for rank in range(n)]


@pytest.mark.parametrize("n", [1, 2])
def test_lightning_ddp_fit(ranks, n):
    results = ranks(n, _lightning_fit)
    assert results == [(n, pytest.approx(8.5))] * n


@pytest.mark.parametrize("n", [1, 2, 3])
def test_accelerate_loop(ranks, n):
    results = ranks(n, _accelerate_loop)
    kind = "DistributedType.MULTI_CPU"  # with one rank too, as under `torchrun --nproc-per-node 1`
    # 16 rows do not divide by 3: what every rank must agree on is the mean over ranks of the local means.
    rows = torch.arange(1, 17, dtype=torch.float64)
    expected = torch.stack([rows[rank::n].mean() for rank in range(n)]).mean().item()
    assert results == [(n, kind, pytest.approx(expected))] * n


def test_an_exception_comes_back_and_the_pool_survives(ranks):
    with pytest.raises(RankError, match="rank one has no batch"):
        ranks(2, _one_rank_raises)
    assert ranks(2, _sum_of_ranks)[1] == (1, 2, 1.0)


@pytest.mark.parametrize(("fn", "message"), [(_one_rank_hangs, "did not come back"), (_one_rank_dies, "died")])
def test_a_lost_rank_is_replaced(ranks, fn, message):
    with pytest.raises(RankError, match=message):
        ranks(2, fn, timeout=5.0)
    assert ranks(2, _sum_of_ranks)[0] == (0, 2, 1.0)


def test_the_environment_is_put_back(ranks):
    ranks(1, lambda rank, n: os.environ.update(LEFTOVER="1"))
    assert ranks(1, lambda rank, n: os.environ.get("LEFTOVER")) == [None]
