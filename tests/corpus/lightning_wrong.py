"""Lightning loops that are wrong (rows L1 to L17)."""

from __future__ import annotations

import contextlib
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning_loops import examples, fit, network
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from accum_plugin.reduction import sum_hook
from corpus.case import Outcome, Setting
from corpus.dealing import deal, even


def lightning(at: Setting, step: Any, batches: list[Any], meant: Any = None, **keywords: Any) -> Outcome:
    """Fit on this rank's microbatches; see :func:`lightning_loops.fit`."""
    assert at.n == 1 or torch.distributed.get_world_size() == at.n
    run = fit(step, batches, mode=at.mode, **{"K": at.K, **keywords})
    return Outcome([gradient.tolist() for gradient in run.grads], run.findings, run.windows, meant)


def mean(loop: Any, batch: Any, index: int) -> Any:
    return loop.model(batch).mean()


def total(loop: Any, batch: Any, index: int) -> Any:
    return loop.model(batch).sum()


def register_sum_hook(loop: Any) -> None:
    """DDP adds gradients up and does not divide."""
    if torch.distributed.is_initialized():
        loop.trainer.strategy.model.register_comm_hook(None, sum_hook)


def divided_twice(at: Setting) -> Outcome:
    return lightning(at, lambda loop, x, index: loop.model(x).mean() / at.K, *even(at))


def never_divided(at: Setting) -> Outcome:
    def step(loop: Any, x: Any, index: int) -> None:
        loop.manual_backward(loop.model(x).mean())
        if (index + 1) % at.K == 0:
            loop.optimizers().step()
            loop.optimizers().zero_grad()

    return lightning(at, step, *even(at, at.K, at.K), manual=True)


def last_window_incomplete(at: Setting) -> Outcome:
    return lightning(at, mean, *even(at, at.K, at.K, at.m))


def epoch_shorter_than_window(at: Setting) -> Outcome:
    batches, meant = even(at, at.m)
    return lightning(at, mean, batches, meant * 2, max_epochs=2)


def padded_sequences(at: Setting) -> Outcome:
    lengths = [[[4, 2, 1], [2, 5, 3], [6, 6, 1]], [[1, 1, 1], [3, 2, 2], [5, 1, 4]]]  # rank, microbatch, sequence
    tokens, labels = examples(6 * 3 * at.K * at.n)
    tokens, labels = (part.unflatten(0, (at.n, at.K, 3, 6)) for part in (tokens, labels))
    valid = torch.arange(6) < torch.tensor(lengths)[..., None]
    labels = labels.where(valid, -100)
    model = network()
    F.cross_entropy(model(tokens).flatten(0, -2), labels.flatten()).backward()
    meant = torch.cat([p.grad.flatten() for p in model.parameters()]).tolist()

    def step(loop: Any, batch: Any, index: int) -> Any:
        return F.cross_entropy(loop.model(batch[0]).flatten(0, -2), batch[1].flatten())

    batches = list(zip(tokens[at.rank], labels[at.rank]))
    return lightning(at, step, batches, [meant], model=network())


def raw_backward_under_ddp(at: Setting) -> Outcome:
    def step(loop: Any, x: Any, index: int) -> None:
        loop.model(x).mean().backward()
        loop.optimizers().step()
        loop.optimizers().zero_grad()

    return lightning(at, step, even(at, 2)[0], manual=True)


def clipped_in_training_step(at: Setting) -> Outcome:
    def step(loop: Any, x: Any, index: int) -> Any:
        torch.nn.utils.clip_grad_norm_(loop.parameters(), 1.0)
        return loop.model(x).mean()

    return lightning(at, step, *even(at))


class _ClipAfterBackward(L.Callback):
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        torch.nn.utils.clip_grad_norm_(pl_module.parameters(), 1.0)


def _half_precision(scale: float) -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=scale))


def clipped_before_unscaling(at: Setting) -> Outcome:
    plugins, callbacks = [_half_precision(1024.0)], [_ClipAfterBackward()]
    return lightning(at, mean, even(at, 2)[0], plugins=plugins, callbacks=callbacks)


def schedule_per_epoch(at: Setting) -> Outcome:
    def optimizers(loop: Any) -> Any:
        optimizer = torch.optim.SGD(loop.parameters(), lr=0.1)
        return [optimizer], [OneCycleLR(optimizer, 0.1, total_steps=int(loop.trainer.estimated_stepping_batches))]

    return lightning(at, mean, even(at, at.K, at.K, at.K)[0], optimizers=optimizers, max_epochs=2)


def sum_hook_on_local_means(at: Setting) -> Outcome:
    return lightning(at, mean, *even(at), started=register_sum_hook)


def plain_sum(at: Setting) -> Outcome:
    batches, means = even(at, size=2)
    return lightning(at, total, batches, [[value * 2 * at.n * at.K for value in window] for window in means])


class Adversaries(nn.Module):
    """A generator and a discriminator of one weight each."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        self.discriminator = nn.Linear(1, 1, bias=False, dtype=torch.float64)


def adversaries() -> Adversaries:
    torch.manual_seed(5)
    return Adversaries()


def each_its_optimizer(loop: Any) -> Any:
    parts = loop.model.generator, loop.model.discriminator
    return [torch.optim.SGD(part.parameters(), lr=0.125) for part in parts], []


def gradients_left_in_the_other(at: Setting) -> Outcome:
    def step(loop: Any, x: Any, index: int) -> None:
        first, second = loop.optimizers()
        made = loop.model.generator(x[:, None])
        loop.manual_backward(F.softplus(-loop.model.discriminator(made)).mean())
        first.step()
        first.zero_grad()
        judged = F.softplus(loop.model.discriminator(made.detach())) + F.softplus(-loop.model.discriminator(x[:, None]))
        loop.manual_backward(judged.mean())
        second.step()
        second.zero_grad()

    return lightning(at, step, even(at, 3)[0], manual=True, model=adversaries(), optimizers=each_its_optimizer)


def static_graph(at: Setting) -> Outcome:
    from accum_plugin.lightning import AccumulationCallback

    callback = AccumulationCallback(at.mode or "warn")
    strategy = DDPStrategy(process_group_backend="gloo", static_graph=True)
    with contextlib.suppress(RuntimeError):  # the reducer's assertion, in the first window
        fit(mean, even(at)[0], K=at.K, callback=callback, strategy=strategy)
    return Outcome([], list(callback.findings), [])


def no_loss_for_one_microbatch(at: Setting) -> Outcome:
    def step(loop: Any, x: Any, index: int) -> Any:
        return loop.model(x).mean() if index < at.m else None

    batches, meant = deal(at, [[[5] * at.m]])
    return lightning(at, step, [*batches, *batches[: at.K - at.m]], meant)


def overflow_skips_the_step(at: Setting) -> Outcome:
    def optimizers(loop: Any) -> Any:
        optimizer = torch.optim.SGD(loop.parameters(), lr=0.1)
        schedule = {"scheduler": LambdaLR(optimizer, lambda step: 1.0), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def step(loop: Any, x: Any, index: int) -> Any:
        loss = loop.model(x).mean()
        return loss * 1e306 if index == at.K else loss  # times the loss scale: infinite in the second window

    plugins = [_half_precision(1024.0)]
    return lightning(at, step, even(at, at.K, at.K, at.K)[0], plugins=plugins, optimizers=optimizers)


def two_steps_of_three(outcome: Outcome) -> bool:
    """The skipped step is no optimizer step, and its microbatches are counted all the same."""
    steps = [window.optimizer_step for window in outcome.windows]
    return steps == [0, 1] and outcome.windows[-1].microbatches_total == 3 * outcome.windows[-1].microbatches


def padded_sampler(at: Setting) -> Outcome:
    examples = list(torch.arange(1.0, 6.0, dtype=torch.float64)[:, None])
    return lightning(at, mean, examples, use_distributed_sampler=True)
