"""Accelerate loops that are right, though they look odd (silent rows)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from accelerate_loops import Loop
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from corpus.accelerate_wrong import accelerate, scheduler_of
from corpus.case import Outcome, Setting
from corpus.dealing import EXAMPLES


def windows(loop: Loop, K: int) -> Iterator[list[Tensor]]:
    """The loader's batches, ``K`` at a time, the last few too."""
    held: list[Tensor] = []
    for (x,) in loop.loader:
        held.append(x)
        if len(held) == K:
            yield held
            held = []
    if held:
        yield held


def finish(loop: Loop) -> None:
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def documented_recipe(at: Setting) -> Outcome:
    def loop(loop: Loop) -> None:
        accelerator = loop.accelerator
        for batches in windows(loop, at.K):
            count = accelerator.gather(torch.tensor([sum(len(x) for x in batches)])).sum().item()
            for index, x in enumerate(batches):
                last = index + 1 == len(batches)
                with contextlib.nullcontext() if last or loop.ranks == 1 else accelerator.no_sync(loop.model):
                    loss = loop.model(x).sum() * accelerator.gradient_accumulation_steps * loop.ranks / count
                    accelerator.backward(loss)
            finish(loop)

    return accelerate(at, loop, num=at.n * (2 * at.K + 1) * EXAMPLES)


def prepared_and_unguarded(at: Setting) -> Outcome:
    return scheduler_of(at, 4 * at.n)


def own_modulo(at: Setting) -> Outcome:
    def loop(loop: Loop) -> None:
        for index, (x,) in enumerate(loop.loader):
            loop.accelerator.backward(loop.model(x).mean() / at.K)
            if (index + 1) % at.K == 0:
                finish(loop)

    return accelerate(at, loop, steps=1, num=3 * at.K * EXAMPLES)


class Encoders(nn.Module):
    """Queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.query, self.key = (nn.Linear(3, 4, bias=False, dtype=torch.float64) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.query(x), self.key(x + 0.1)


def gathered_contrastive(at: Setting) -> Outcome:
    def everyone(features: Tensor) -> Tensor:
        parts = [torch.empty_like(features) for _ in range(at.n)]
        dist.all_gather(parts, features.detach())
        parts[at.rank] = features  # only this rank's own part carries a gradient
        return torch.cat(parts)

    def loop(loop: Loop) -> None:
        for (x,) in loop.loader:
            queries, keys = (everyone(features) for features in loop.model(x))
            loss = F.cross_entropy(queries @ keys.T, torch.arange(len(queries))) * at.n  # undoes DDP's average
            loop.accelerator.backward(loss)
            finish(loop)

    generator = torch.Generator().manual_seed(1)
    features = torch.randn(at.n * 3 * EXAMPLES, 3, dtype=torch.float64, generator=generator)
    return accelerate(at, loop, data=TensorDataset(features), model=Encoders, lr=0.125)


def gradients_multiplied_by_hand(at: Setting) -> Outcome:
    def loop(loop: Loop) -> None:
        for batches in windows(loop, at.K):
            units = torch.zeros(())
            for index, x in enumerate(batches):
                x = x[: 3 + (index + at.rank) % 3]  # ragged
                last = index + 1 == len(batches)
                with contextlib.nullcontext() if last else loop.accelerator.no_sync(loop.model):
                    loop.accelerator.backward(loop.model(x).sum())
                units += len(x)
            dist.all_reduce(units)
            for parameter in loop.model.parameters():
                parameter.grad.mul_(at.n / units.item())
            finish(loop)

    return accelerate(at, loop, steps=1, num=2 * at.n * at.K * EXAMPLES)


def toggled_by_hand(at: Setting) -> Outcome:
    def loop(loop: Loop) -> None:
        for batches in windows(loop, at.K):
            for index, x in enumerate(batches):
                loop.model.require_backward_grad_sync = index + 1 == len(batches)
                loop.accelerator.backward(loop.model(x).mean() / at.K)
            finish(loop)

    return accelerate(at, loop, steps=1, num=2 * at.n * at.K * EXAMPLES)


def scheduler_counts_ranks(at: Setting) -> Outcome:
    return scheduler_of(at, 4 * at.n, epochs=2)
