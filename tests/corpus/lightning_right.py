"""Lightning loops that are right, though they look odd (silent rows)."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning_loops import examples, network
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn import functional as F

from corpus.case import Outcome, Setting
from corpus.dealing import deal, even
from corpus.lightning_wrong import adversaries, each_its_optimizer, lightning, mean, register_sum_hook


def classes(at: Setting, num: int = 5, windows: int = 2) -> list[Any]:
    """This rank's microbatches of features and classes."""
    microbatches = at.K * windows
    features, labels = (part.chunk(at.n)[at.rank].chunk(microbatches) for part in examples(num * at.n * microbatches))
    return list(zip(features, labels))


def half_mse(at: Setting) -> Outcome:
    def step(loop: Any, batch: Any, index: int) -> Any:
        return 0.5 * F.mse_loss(loop.model(batch[0]), F.one_hot(batch[1], 4).double())

    return lightning(at, step, classes(at), model=network())


def prior_preservation(at: Setting) -> Outcome:
    def step(loop: Any, batch: Any, index: int) -> Any:
        predicted, target = loop.model(batch[0]), F.one_hot(batch[1], 4).double()
        instance, prior = predicted.chunk(2)
        wanted, wanted_prior = target.chunk(2)
        return F.mse_loss(instance, wanted) + 1.0 * F.mse_loss(prior, wanted_prior)

    return lightning(at, step, classes(at, num=6), model=network())


def min_snr(at: Setting) -> Outcome:
    def step(loop: Any, batch: Any, index: int) -> Any:
        error = F.mse_loss(loop.model(batch[0]), F.one_hot(batch[1], 4).double(), reduction="none")
        signal = 1.0 + batch[0].square().sum(dim=1)
        weight = signal.clamp(max=5.0) / signal
        return (error.mean(dim=1) * weight).mean()

    return lightning(at, step, classes(at), model=network())


def label_smoothing(at: Setting) -> Outcome:
    def step(loop: Any, batch: Any, index: int) -> Any:
        return F.cross_entropy(loop.model(batch[0]), batch[1], label_smoothing=0.1)

    return lightning(at, step, classes(at), model=network())


def several_terms(at: Setting) -> Outcome:
    def step(loop: Any, batch: Any, index: int) -> Any:
        logits = loop.model(batch[0])
        extra = logits.square().sum() / len(logits)
        penalty = 1e-3 * sum(p.square().sum() for p in loop.parameters())
        return F.cross_entropy(logits, batch[1]) + 0.1 * extra + penalty

    return lightning(at, step, classes(at), model=network())


def constant_normalizer(at: Setting) -> Outcome:
    def step(loop: Any, batch: Any, index: int) -> Any:
        each = F.cross_entropy(loop.model(batch[0]), batch[1], reduction="none")
        mask = torch.arange(len(each)) < 3 + index % 3  # ragged completions
        return (each * mask).sum() / (len(each) * 7)

    return lightning(at, step, classes(at), model=network())


def manual_and_divided(at: Setting) -> Outcome:
    def step(loop: Any, x: Any, index: int) -> None:
        loop.manual_backward(loop.model(x).mean() / at.K)
        if (index + 1) % at.K == 0:
            loop.optimizers().step()
            loop.optimizers().zero_grad()

    return lightning(at, step, even(at, at.K, at.K)[0], manual=True)


def toggled_adversaries(at: Setting) -> Outcome:
    def step(loop: Any, x: Any, index: int) -> None:
        first, second = loop.optimizers()
        x = x[:, None]
        loop.toggle_optimizer(second)
        made = loop.model.generator(x).detach()
        judged = F.softplus(loop.model.discriminator(made)) + F.softplus(-loop.model.discriminator(x))
        second.zero_grad()
        loop.manual_backward(judged.mean())
        second.step()
        loop.untoggle_optimizer(second)
        if index % 3 == 2:  # the generator moves at every third batch
            loop.toggle_optimizer(first)
            first.zero_grad()
            loop.manual_backward(F.softplus(-loop.model.discriminator(loop.model.generator(x))).mean())
            first.step()
            loop.untoggle_optimizer(first)

    return lightning(at, step, even(at, 6)[0], manual=True, model=adversaries(), optimizers=each_its_optimizer)


def summed_and_globally_normalized(at: Setting) -> Outcome:
    def step(loop: Any, x: Any, index: int) -> Any:
        count = torch.tensor(float(len(x)))
        dist.all_reduce(count)
        return loop.model(x).sum() / count

    sizes = [[5] * at.K for _ in range(at.n)]
    return lightning(at, step, deal(at, [sizes, sizes])[0], started=register_sum_hook)


def summed_over_the_windows_tokens(at: Setting) -> Outcome:
    batches = even(at, at.K, at.K)[0]

    def step(loop: Any, x: Any, index: int) -> None:
        count = torch.tensor(float(sum(len(x) for x in batches[index // at.K * at.K :][: at.K])))
        dist.all_reduce(count)
        last = (index + 1) % at.K == 0
        loop.trainer.strategy.model.require_backward_grad_sync = last
        loop.manual_backward(loop.model(x).sum() / count)
        if last:
            loop.optimizers().step()
            loop.optimizers().zero_grad()

    return lightning(at, step, batches, manual=True, started=register_sum_hook)


def synchronized_every_time(at: Setting) -> Outcome:
    def step(loop: Any, x: Any, index: int) -> None:
        loop.manual_backward(loop.model(x).mean() / at.K)  # DDP averages at each of them
        if (index + 1) % at.K == 0:
            loop.optimizers().step()
            loop.optimizers().zero_grad()

    return lightning(at, step, even(at, at.K, at.K)[0], manual=True)


def compressed_to_fp16(at: Setting) -> Outcome:
    def register(loop: Any) -> None:
        loop.trainer.strategy.model.register_comm_hook(None, fp16_compress_hook)

    def step(loop: Any, batch: Any, index: int) -> Any:
        return F.cross_entropy(loop.model(batch[0]), batch[1])

    return lightning(at, step, classes(at), model=network(), started=register)


class _ReadsOutputs(L.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


def loss_in_the_outputs(at: Setting) -> Outcome:
    callback = _ReadsOutputs()
    returned: list[float] = []

    def step(loop: Any, x: Any, index: int) -> Any:
        loss = loop.model(x).mean()
        returned.append(float(loss))
        return loss

    outcome = lightning(at, step, even(at, at.K, at.K)[0], callbacks=[callback])
    outcome.note = [loss * at.K for loss in callback.losses] == returned and returned[-1] != 0.0
    return outcome


def outputs_hold_the_divided_loss(outcome: Outcome) -> bool:
    """A callback finds the loss over ``K`` in ``outputs``."""
    return outcome.note is True


def global_step_over_optimizers(at: Setting) -> Outcome:
    counted: list[int] = []

    def step(loop: Any, x: Any, index: int) -> None:
        for optimizer, part in zip(loop.optimizers(), (loop.model.generator, loop.model.discriminator)):
            optimizer.zero_grad()
            loop.manual_backward(part(x[:, None]).square().mean())
            optimizer.step()
        counted.append(loop.global_step)

    outcome = lightning(at, step, even(at, 3)[0], manual=True, model=adversaries(), optimizers=each_its_optimizer)
    outcome.note = counted
    return outcome


def steps_are_each_optimizers_own(outcome: Outcome) -> bool:
    """Lightning's global step counts both optimizers' steps; the plugin's count is each one's own."""
    own = [window.optimizer_step for window in outcome.windows if window.optimizer == 0]
    return outcome.note == [2, 4, 6] and own == [0, 1, 2]


class _LogsNorm(L.Callback):
    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
        self.norms.append(float(torch.nn.utils.get_total_norm(grads)))


def norm_logged_before_clipping(at: Setting) -> Outcome:
    callback = _LogsNorm()
    outcome = lightning(at, mean, even(at, at.K, at.K)[0], callbacks=[callback], gradient_clip_val=1.0)
    outcome.note = callback.norms
    return outcome


def norms_are_above_the_clip(outcome: Outcome) -> bool:
    """The norm that a callback logs, and the plugin's, are the unclipped ones."""
    return min(outcome.note) > 1.0 and outcome.note == [window.grad_norm for window in outcome.windows]


def short_last_batch(at: Setting) -> Outcome:
    return lightning(at, mean, deal(at, [[[5]], [[5]], [[2]]])[0])
