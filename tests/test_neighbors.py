"""The neighbors' pure parts: schedule lengths, padding, effective batches, order of events in words."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.data.distributed import DistributedSampler

from accum_plugin.loss_graph import read_loss
from accum_plugin.neighbors.configuration import deepspeed_steps
from accum_plugin.neighbors.horizon import Horizon, read_horizon
from accum_plugin.neighbors.lengths import Run, judge_length
from accum_plugin.neighbors.resume import EffectiveBatch, compare
from accum_plugin.neighbors.samplers import even_padding, sampler_padding
from accum_plugin.neighbors.schedulers import Schedule, find_schedulers, judge_advances, owner_of
from accum_plugin.neighbors.stepping import unexplained_divisor
from accum_plugin.taps import clip_taps


@pytest.fixture
def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)


def test_lengths_of_pytorchs_schedules(optimizer):
    def length(kind, *args, **keywords):
        horizon = read_horizon(kind(optimizer, *args, **keywords))
        return None if horizon is None else (horizon.length, horizon.warmup)

    assert length(lr_scheduler.OneCycleLR, 0.1, total_steps=70) == (70, 0)
    assert length(lr_scheduler.OneCycleLR, 0.1, epochs=7, steps_per_epoch=10) == (70, 0)
    assert length(lr_scheduler.CosineAnnealingLR, 70) == (70, 0)
    assert length(lr_scheduler.PolynomialLR, 70) == (70, 0)
    assert length(lr_scheduler.LinearLR, 1.0, 0.1, 70) == (70, 0)
    assert length(lr_scheduler.LinearLR, 0.1, 1.0, 70) == (None, 70)
    assert length(lr_scheduler.ConstantLR, 0.5, 70) == (None, 70)
    endless = [
        (lr_scheduler.StepLR, 10),
        (lr_scheduler.ExponentialLR, 0.9),
        (lr_scheduler.CosineAnnealingWarmRestarts, 70),
        (lr_scheduler.ReduceLROnPlateau,),
        (lr_scheduler.LambdaLR, lambda step: 1.0),
    ]
    assert [length(*each) for each in endless] == [None] * len(endless)


def test_lengths_of_composed_schedules(optimizer):
    warmup = lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=10)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
    sequence = read_horizon(lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[10]))
    assert (sequence.length, sequence.warmup) == (70, 10)
    assert "T_max=60" in sequence.setting and "milestones=[10]" in sequence.setting
    chain = read_horizon(lr_scheduler.ChainedScheduler([warmup, cosine]))
    assert (chain.length, chain.warmup) == (60, 10)


def test_lengths_of_transformers_schedules(optimizer):
    transformers = pytest.importorskip("transformers")
    for name in ("linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt", "constant_with_warmup"):
        scheduler = transformers.get_scheduler(name, optimizer, num_warmup_steps=10, num_training_steps=70)
        horizon = read_horizon(scheduler)
        has_end = name not in ("inverse_sqrt", "constant_with_warmup")
        assert (horizon.length, horizon.warmup) == (70 if has_end else None, 10), name
    assert read_horizon(transformers.get_scheduler("constant", optimizer)) is None


def test_length_of_a_closure_and_of_a_class_of_the_users_own(optimizer):
    def decay(total_steps):
        return lambda step: max(0.0, 1 - step / total_steps)

    class Warmup(lr_scheduler.LRScheduler):
        def __init__(self, optimizer, warmup_epochs, max_epochs):
            self.warmup_epochs, self.max_epochs = warmup_epochs, max_epochs
            super().__init__(optimizer)

        def get_lr(self):
            return self.base_lrs

    assert read_horizon(lr_scheduler.LambdaLR(optimizer, decay(70))).length == 70
    own = read_horizon(Warmup(optimizer, 3, 70))
    assert (own.length, own.warmup, own.setting) == (70, 3, "Warmup(max_epochs=70)")


RUN = Run(optimizer_steps=300, microbatches=1200, epochs=10, num_ranks=2)


@pytest.mark.parametrize(
    "length, advances, pace, words",
    [
        (1200, 300, "once per optimizer step", "in microbatches;"),
        (2400, 300, "once per optimizer step", "microbatches of all ranks"),
        (600, 300, "once per optimizer step", "optimizer steps times ranks"),
        (150, 300, "once per optimizer step", "one rank's share"),
        (300, 600, "2 times per optimizer step", "in optimizer steps;"),
        (300, 10, "once per epoch", "in optimizer steps;"),
        (293, 10, "once per epoch", "in optimizer steps;"),  # rounded down in every epoch
        (1196, 300, "once per optimizer step", "in microbatches;"),
        (10, 300, "once per optimizer step", "in epochs;"),
    ],
)
def test_a_length_in_another_unit(length, advances, pace, words):
    finding = judge_length(Horizon(length, "S"), advances, pace, RUN)
    assert words in finding.message and str(advances) in finding.hint
    assert finding.certainty == ("suspected" if "epochs" in words else "certain")


@pytest.mark.parametrize("length", [300, 299, 305, 100, 500, 1000, 5000, None])
def test_a_length_that_fits_or_is_simply_another_one_is_silent(length):
    assert judge_length(Horizon(length, "S"), 300, "once per optimizer step", RUN) is None


def test_advances(optimizer):
    schedule = Schedule(lr_scheduler.StepLR(optimizer, 10))

    def judged(advances, microbatches, skipped=0, repeated=1, per_step=1, ranks=1):
        mine = Schedule(schedule.scheduler, per_step=per_step, managed=per_step > 1)
        finding = judge_advances(mine, advances, microbatches, skipped, repeated, ranks)
        return finding and finding.certainty

    assert judged(4, 4) == judged(8, 4) == "certain"
    assert judged(5, 4) == judged(2, 1, repeated=3) == "suspected"
    assert judged(2, 4, skipped=1) == "info"
    silent = [(0, 4), (1, 4), (1, 1), (2, 1), (3, 4)]
    assert [judged(*each) for each in silent] == [None] * len(silent)
    assert judged(3, 4, per_step=3, ranks=3) is None and judged(3, 1, ranks=3, repeated=9) is None


def test_schedulers_are_found_with_their_optimizer(optimizer):
    scheduler = lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.StepLR(optimizer, 3)], milestones=[2]
    )
    mine = [each for each in find_schedulers() if owner_of(each) is optimizer]
    assert mine == [scheduler]


@pytest.mark.parametrize("size, ranks, repeats", [(5, 2, 1), (6, 2, 0), (7, 3, 2), (1, 3, 2)])
def test_padding_of_a_distributed_sampler(size, ranks, repeats):
    samplers = [DistributedSampler(range(size), num_replicas=ranks, rank=rank, shuffle=False) for rank in range(ranks)]
    drawn = [index for sampler in samplers for index in sampler]
    assert len(drawn) - len(set(drawn)) == repeats
    padding = sampler_padding(samplers[0])
    assert (padding.repeats if padding else 0) == repeats
    assert sampler_padding(DistributedSampler(range(size), num_replicas=1, rank=0, drop_last=True)) is None


@pytest.mark.parametrize("size, batch, ranks", [(5, 2, 2), (8, 2, 2), (9, 2, 2), (1, 2, 3), (7, 3, 2)])
def test_padding_of_even_batches(size, batch, ranks):
    from accelerate.data_loader import BatchSamplerShard
    from torch.utils.data import BatchSampler, SequentialSampler

    def shard(rank):
        return BatchSamplerShard(BatchSampler(SequentialSampler(range(size)), batch, False), ranks, rank)

    drawn = [index for rank in range(ranks) for indices in shard(rank) for index in indices]
    padding = even_padding(size, batch * ranks)
    assert len(drawn) - size == (padding.repeats if padding else 0)


def test_effective_batches():
    saved = EffectiveBatch(4, 2, 8, (0.1,))
    assert EffectiveBatch.from_dict(saved.to_dict()) == saved and saved.product == 64
    changed = compare(saved, EffectiveBatch(4, 2, 2, (0.1,)))
    assert "4 x 2 x 8 = 64" in changed.message and "ranks 8 -> 2" in changed.message
    assert "accumulation steps" not in changed.message.split("(ranks")[1].split(")")[0]
    assert compare(saved, EffectiveBatch(4, 8, 2, (0.1,))) is None
    assert compare(saved, EffectiveBatch(4, 2, 2, (0.05,))) is None
    assert compare(saved, EffectiveBatch(4, 2, 2, (0.1, 0.1))) is None


def test_divisors_that_nothing_explains():
    w = torch.nn.Parameter(torch.ones(5)) * torch.arange(5.0)

    def divisor(loss, ranks=1):
        return unexplained_divisor(read_loss(loss), ranks)

    assert divisor(w.mean() / 4) == 4
    assert divisor(w.sum() / 5) is divisor(w.mean() * 0.25) is divisor(w.mean() / 4.5) is None
    assert divisor((w - 1).pow(2).mean() / 2) is None  # half the squared error
    assert divisor((w.mean() + w.exp().mean()) / 2) is divisor(w.mean() / 3, ranks=3) is None


def test_deepspeeds_own_number_of_steps():
    assert deepspeed_steps({"gradient_accumulation_steps": 8}) == 8
    assert deepspeed_steps({"gradient_accumulation_steps": "auto"}) is None
    assert deepspeed_steps({}) is deepspeed_steps(None) is None


def test_tapped_functions_keep_name_and_signature():
    class Listener:
        def before_clip(self, grads, threshold, norm):
            seen.append((len(grads), threshold, norm is None))

    seen: list[tuple[int, float, bool]] = []
    before = torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_
    signatures = [inspect.signature(function) for function in before]
    listener = Listener()
    for tap in clip_taps:
        tap.add(listener)
    after = torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_
    assert [inspect.signature(function) for function in after] == signatures
    assert [function.__name__ for function in after] == ["clip_grad_norm_", "clip_grad_value_"]
    w = torch.nn.Parameter(torch.ones(4))
    w.grad = torch.ones(4)
    assert torch.nn.utils.clip_grad_norm_((p for p in [w]), 1.0) == 2.0  # a generator is not used up
    torch.nn.utils.clip_grad_value_(w, 0.25)
    torch.nn.utils.clip_grad_norm_(w, float("inf"))
    for tap in clip_taps:
        tap.discard(listener)
    assert seen == [(1, 1.0, False), (1, 0.25, True)]
    assert w.grad.tolist() == [0.25] * 4
    assert torch.nn.utils.clip_grad_value_ is before[1]
