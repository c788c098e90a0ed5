"""Accelerate loops that are wrong (rows A1 to A15)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin
from accelerate_loops import Loop, Scalar, counting, fresh, train
from lightning_loops import examples, network
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from accum_plugin.accelerate import AccumulationHook
from corpus.case import Outcome, Setting
from corpus.dealing import EXAMPLES, even


def accelerate(at: Setting, loop: Callable[[Loop], Any], meant: Any = None, **keywords: Any) -> Outcome:
    """Run a loop over one window of examples 1, 2, 3, ...; see :func:`accelerate_loops.train`."""
    options = {"steps": at.K, "batch": EXAMPLES, "num": at.n * at.K * EXAMPLES, **keywords}
    result = train(loop, mode=at.mode, **options)
    return Outcome(result.gradients, result.findings, result.windows, meant, result.returned)


def documented(loop: Loop, loss: Callable[[Any], Any] = torch.mean) -> None:
    """The loop of the documentation, around a loss of the outputs."""
    for (x,) in loop.loader:
        with loop.accelerator.accumulate(loop.model):
            loop.accelerator.backward(loss(loop.model(x)))
            loop.optimizer.step()
            loop.optimizer.zero_grad()


def whole(at: Setting) -> list[list[float]]:
    """The mean over one window of examples."""
    return [[(at.n * at.K * EXAMPLES + 1) / 2]]


def divided_twice(at: Setting) -> Outcome:
    return accelerate(at, lambda loop: documented(loop, lambda losses: losses.mean() / at.K), whole(at))


def steps_never_given(at: Setting) -> Outcome:
    _, meant = even(at, *[1] * at.K)
    return accelerate(at, lambda loop: documented(loop, lambda losses: losses.mean() / at.K), meant, steps=1)


def optimizer_never_prepared(at: Setting) -> Outcome:
    fresh()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=at.K)
    hook = AccumulationHook.attach(accelerator, at.mode) if at.mode else None
    net = Scalar()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.125)
    model, loader = accelerator.prepare(net, DataLoader(counting(at.n * at.K * EXAMPLES), batch_size=EXAMPLES))
    documented(Loop(accelerator, model, optimizer, loader, None, at.K))
    return _detached(hook)


def _detached(hook: AccumulationHook | None) -> Outcome:
    if hook is None:
        return Outcome([], [], [])
    hook.detach()
    return Outcome([], hook.findings, list(hook.windows))


def cleared_first(at: Setting) -> Outcome:
    def loop(loop: Loop) -> None:
        for (x,) in loop.loader:
            with loop.accelerator.accumulate(loop.model):
                loop.optimizer.zero_grad()
                loop.accelerator.backward(loop.model(x).mean())
                loop.optimizer.step()

    return accelerate(at, loop)


def raw_backward(at: Setting) -> Outcome:
    def loop(loop: Loop) -> None:
        for (x,) in loop.loader:
            with loop.accelerator.accumulate(loop.model):
                loop.model(x).mean().backward()
                loop.optimizer.step()
                loop.optimizer.zero_grad()

    return accelerate(at, loop, whole(at))


def sliced_last_batch(at: Setting) -> Outcome:
    def loop(loop: Loop) -> None:
        for (x,) in loop.loader:
            for part in x.chunk(at.K):
                with loop.accelerator.accumulate(loop.model):
                    loop.accelerator.backward(loop.model(part).mean())
                    loop.optimizer.step()
                    loop.optimizer.zero_grad()

    last = [6 * at.K - 0.5]  # the mean of the last slice, which holds two examples
    return accelerate(at, loop, [last], batch=2 * at.K, num=6 * at.K)


def clipped_every_time(at: Setting) -> Outcome:
    def loop(loop: Loop) -> None:
        for (x,) in loop.loader:  # each microbatch contributes 8 / 4 = 2
            with loop.accelerator.accumulate(loop.model):
                loop.accelerator.backward(loop.model(x).mean())
                torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
                loop.optimizer.step()
                loop.optimizer.zero_grad()

    return accelerate(at, loop, data=TensorDataset(torch.full((4,), 8.0, dtype=torch.float64)), batch=1)


def _global_count(loop: Loop, x: Any) -> Any:
    return loop.accelerator.reduce(torch.tensor(float(len(x))), "sum")


def sum_over_global_count(at: Setting) -> Outcome:
    def loop(loop: Loop) -> None:
        for (x,) in loop.loader:
            with loop.accelerator.accumulate(loop.model):
                loop.accelerator.backward(loop.model(x).sum() / _global_count(loop, x))
                loop.optimizer.step()
                loop.optimizer.zero_grad()

    return accelerate(at, loop, whole(at))


def times_num_processes(at: Setting) -> Outcome:
    return accelerate(at, lambda loop: documented(loop, lambda losses: losses.mean() * loop.ranks), whole(at))


def incomplete_last_window(at: Setting) -> Outcome:
    first, last = at.K * EXAMPLES, (at.K + at.m) * EXAMPLES
    meant = [[(first + 1) / 2], [(first + 1 + last) / 2]]
    return accelerate(at, documented, meant, num=last)


def ragged_tokens(at: Setting) -> Outcome:
    tokens, labels = examples(6 * 2 * at.K * at.n)
    tokens, labels = tokens.unflatten(0, (-1, 6)), labels.unflatten(0, (-1, 6))
    lengths = torch.tensor([4, 2, 1, 2, 5, 3, 6, 6, 1, 3, 2, 2])[:, None]
    labels = labels.where(torch.arange(6) < lengths, -100)
    reference = network()
    F.cross_entropy(reference(tokens).flatten(0, -2), labels.flatten()).backward()

    def loop(loop: Loop) -> None:
        for x, y in loop.loader:
            with loop.accelerator.accumulate(loop.model):
                loop.accelerator.backward(F.cross_entropy(loop.model(x).flatten(0, -2), y.flatten()))
                loop.optimizer.step()
                loop.optimizer.zero_grad()

    meant = [next(reference.parameters()).grad.flatten().tolist()]
    return accelerate(at, loop, meant, data=TensorDataset(tokens, labels), batch=2, model=network)


def value_reduced_without_autograd(at: Setting) -> Outcome:
    def loop(loop: Loop) -> None:
        for (x,) in loop.loader:
            with loop.accelerator.accumulate(loop.model):
                loss = loop.model(x).sum()
                dist.all_reduce(loss.data)  # the value of all ranks, the gradient of this one
                loop.accelerator.backward(loss / _global_count(loop, x))
                loop.optimizer.step()
                loop.optimizer.zero_grad()

    return accelerate(at, loop, whole(at))


def _with_scheduler(loop: Loop, epochs: int = 1) -> None:
    for _ in range(epochs):
        for (x,) in loop.loader:
            with loop.accelerator.accumulate(loop.model):
                loop.accelerator.backward(loop.model(x).mean())
                loop.optimizer.step()
                loop.scheduler.step()
                loop.optimizer.zero_grad()


def scheduler_never_prepared(at: Setting) -> Outcome:
    def loop(loop: Loop) -> None:
        loop.scheduler = LambdaLR(loop.optimizer.optimizer, lambda step: 1.0)
        _with_scheduler(loop, epochs=2)

    return accelerate(at, loop, num=2 * at.K * EXAMPLES)


def scheduler_of(at: Setting, length: int, epochs: int = 2) -> Outcome:
    """Two epochs of two windows each, with a prepared schedule of ``length``."""
    schedule, num = functools.partial(CosineAnnealingLR, T_max=length), 2 * at.n * at.K * EXAMPLES
    return accelerate(at, lambda loop: _with_scheduler(loop, epochs), num=num, scheduler=schedule)


def horizon_in_microbatches(at: Setting) -> Outcome:
    return scheduler_of(at, 4 * at.K)


def horizon_in_steps_of_one_process(at: Setting) -> Outcome:
    return scheduler_of(at, 4)


def padded_last_batch(at: Setting) -> Outcome:
    return accelerate(at, documented, num=5, batch=2)


def five_are_distinct(outcome: Outcome) -> bool:
    """Repeats are not counted twice in the effective batch."""
    return [window.effective_batch for window in outcome.windows] == [5]


def deepspeed_config_disagrees(at: Setting) -> Outcome:
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8, "zero_optimization": {"stage": 0}}

    class WithEngine(AcceleratorState):  # the engine itself need not be installed for its configuration to be read
        deepspeed_plugin = DeepSpeedPlugin(hf_ds_config=config)

    fresh()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=at.K)
    accelerator.state.__class__ = WithEngine
    return _detached(AccumulationHook.attach(accelerator, at.mode) if at.mode else None)
