"""Correct code in which some number happens to equal ``K`` or ``n``: nothing is reported, no bit changes."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate_loops import Loop, Result, fresh, network, quick_collections, quiet, ranked, train
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

from accum_plugin.accelerate import AccumulationHook

LossFunction = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def _quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    fresh()
    with quick_collections(), quiet():
        yield


def targets(out: Tensor) -> Tensor:
    return torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)


def distillation(out: Tensor, labels: Tensor, temperature: float = 2) -> Tensor:
    """The square of the temperature keeps the gradient's size: 4 where ``K`` is 4."""
    teacher = targets(out)
    soft = F.kl_div(
        F.log_softmax(out / temperature, 1), F.softmax(teacher / temperature, 1), reduction="batchmean"
    ) * int(temperature**2)
    return F.cross_entropy(out, labels) + soft


LOSSES: dict[str, tuple[int, LossFunction]] = {
    "twin critics": (2, lambda out, y: F.mse_loss(out, targets(out)) + F.mse_loss(out.tanh(), targets(out))),
    "a dict of four": (4, lambda out, y: sum(F.cross_entropy(out * scale, y) for scale in (1.0, 0.9, 0.8, 0.7))),
    "distillation": (4, distillation),
    "byol": (2, lambda out, y: (2 - 2 * F.cosine_similarity(out, targets(out))).mean()),
    "twice an mse": (2, lambda out, y: 2 * F.mse_loss(out, targets(out))),
    "soft targets": (3, lambda out, y: F.cross_entropy(out, targets(out).softmax(1))),
}


def accumulated(loss_fn: LossFunction, by_hand: bool) -> Callable[[Loop], None]:
    def loop(loop: Loop) -> None:
        for index, (features, labels) in enumerate(loop.loader, start=1):
            if by_hand:
                loop.accelerator.backward(loss_fn(loop.model(features), labels) / loop.steps)
                if index % loop.steps == 0:
                    loop.optimizer.step()
                    loop.optimizer.zero_grad()
                continue
            with loop.accelerator.accumulate(loop.model):
                loop.accelerator.backward(loss_fn(loop.model(features), labels))
                loop.optimizer.step()
                loop.optimizer.zero_grad()

    return loop


def examples(num: int) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(num, 6, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(features, torch.randint(0, 4, (num,), generator=generator))


def check(bare: Result, watched: Result) -> None:
    assert watched.alarms == []
    assert watched.gradients == bare.gradients and len(bare.gradients) >= 2  # to the last bit


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_a_coefficient_is_no_division(name: str, by_hand: bool) -> None:
    steps, loss_fn = LOSSES[name]
    loop, job = accumulated(loss_fn, by_hand), {"model": network, "batch": 5, "data": examples(2 * steps * 5)}
    if by_hand:  # the Accelerator knows of no accumulation, the loop does
        original = loop

        def loop(made: Loop) -> None:
            made.steps = steps
            original(made)

    job["steps"] = 1 if by_hand else steps
    check(train(loop, mode=None, **job), train(loop, **job))


def alternating(loop: Loop) -> None:
    """Microbatches of two tasks take turns; each loss is divided by the two of a window."""
    for index, (features, labels) in enumerate(loop.loader, start=1):
        out = loop.model(features)
        loss = F.cross_entropy(out, labels) if index % 2 else F.mse_loss(out, targets(out))
        loop.accelerator.backward(loss / 2)
        if index % 2 == 0:
            loop.optimizer.step()
            loop.optimizer.zero_grad()


def chunks(loop: Loop) -> None:
    """Each batch in chunks of two, weighted by their share of it."""
    for features, labels in loop.loader:
        for xs, ys in zip(features.split(2), labels.split(2)):
            loop.accelerator.backward(F.cross_entropy(loop.model(xs), ys) * len(xs) / len(features))
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def halves_of_a_batch(loop: Loop) -> None:
    for features, labels in loop.loader:
        for xs, ys in zip(features.chunk(2), labels.chunk(2)):
            loop.accelerator.backward(F.cross_entropy(loop.model(xs), ys) / 2)
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def scaled_by_hand(loop: Loop) -> None:
    """DDP combines at every microbatch, and the sum is divided at the end."""
    for index, (features, labels) in enumerate(loop.loader, start=1):
        loop.accelerator.backward(F.cross_entropy(loop.model(features), labels))
        if index % 4 == 0:
            for parameter in loop.model.parameters():
                parameter.grad.div_(4)
            loop.optimizer.step()
            loop.optimizer.zero_grad()


LOOPS = {"alternating": alternating, "chunks": chunks, "halves": halves_of_a_batch, "scaled": scaled_by_hand}


def test_accumulation_steps_that_equal_the_ranks(ranks: Callable[..., list[list[Result]]]) -> None:
    job = {"model": network, "batch": 6, "steps": 1, "data": examples(2 * 8 * 6)}
    runs = [(loop, {**job, "mode": mode}) for loop in LOOPS.values() for mode in (None, "fix")]
    for results in ranks(2, ranked, runs):
        for index, name in enumerate(LOOPS):
            bare, watched = results[2 * index : 2 * index + 2]
            assert (name, watched.alarms) == (name, [])
            assert watched.gradients == bare.gradients and len(bare.gradients) >= 2, name


def test_a_validation_that_runs_backward_reaches_no_step() -> None:
    def loop(loop: Loop) -> None:
        for features, labels in loop.loader:
            with loop.accelerator.accumulate(loop.model):
                loop.accelerator.backward(F.cross_entropy(loop.model(features), labels))
                loop.optimizer.step()
                loop.optimizer.zero_grad()
        for features, labels in loop.loader:
            F.cross_entropy(loop.model(features), labels).backward()  # saliency, influence: looked at, then cleared
        loop.model.zero_grad()

    job = {"model": network, "batch": 5, "steps": 2, "data": examples(20)}
    result = train(loop, **job)
    assert "ACC208" not in [finding.code for finding in result.findings]


def test_a_prepared_model_is_copied_and_saved_without_the_hook() -> None:
    def loop(loop: Loop) -> list[Any]:
        copies = []
        for index, (features, labels) in enumerate(loop.loader):
            with loop.accelerator.accumulate(loop.model):
                loop.accelerator.backward(F.cross_entropy(loop.model(features), labels))
                loop.optimizer.step()
                loop.optimizer.zero_grad()
            if index == 1:  # in the middle of a window
                copies = [copy.deepcopy(loop.model), AveragedModel(loop.model).module]
                file = io.BytesIO()
                torch.save(loop.model, file)
                file.seek(0)
                copies.append(torch.load(file, weights_only=False))
        features = torch.ones(3, 6, dtype=torch.float64)
        assert all(torch.equal(each(features), copies[0](features)) for each in copies)
        assert AccumulationHook.of(loop.accelerator) is not None
        return copies

    result = train(loop, model=network, batch=5, steps=3, data=examples(30))
    assert result.findings == [] and len(result.windows) == 2
    for each in result.returned:
        hooks = [*each._forward_pre_hooks.values(), *each._forward_hooks.values()]
        assert isinstance(each, nn.Module)
        assert all("accum_plugin" not in type(hook).__module__ for hook in hooks)
