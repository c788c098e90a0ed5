"""Correct Accelerate loops, however odd they look: nothing is reported, and no gradient differs in a single bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate_loops import Loop, Result, full_batch, network, ranked, sequences, windows_of
from torch import Tensor
from torch.distributed.nn.functional import all_gather
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR, LinearLR

STEPS, BATCH = 4, 5


def everywhere(number: float | Tensor) -> Tensor:
    """A number added up over the ranks, without autograd."""
    total = torch.as_tensor(float(number), dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total


def number_of_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def windows(loader: Any, steps: int) -> Any:
    """The loader's batches, ``steps`` at a time; the last list may be shorter."""
    taken: list[Any] = []
    for batch in loader:
        taken.append(batch)
        if len(taken) == steps:
            yield taken
            taken = []
    if taken:
        yield taken


def documented_recipe(loop: Loop) -> None:
    """S1: accelerate's guide for losses over tokens: a sum, times ``K * n / N``, and an own ``no_sync``."""
    for batches in windows(loop.loader, loop.steps):
        num_items = everywhere(sum((labels != -100).sum() for _, labels in batches))
        for index, (tokens, labels) in enumerate(batches):
            last = index == len(batches) - 1
            with contextlib.nullcontext() if last or loop.ranks == 1 else loop.model.no_sync():
                logits = loop.model(tokens)
                loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
                loop.accelerator.backward(loss * loop.steps * loop.accelerator.num_processes / num_items)
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def unguarded(loop: Loop) -> None:
    """S3: prepared objects called at every microbatch wait for the window's end by themselves."""
    for (x,) in loop.loader:
        with loop.accelerator.accumulate(loop.model):
            loop.accelerator.backward(loop.model(x).mean())
            if loop.accelerator.sync_gradients:
                loop.accelerator.clip_grad_norm_(loop.model.parameters(), 1e9)
            loop.optimizer.step()
            loop.scheduler.step()
            loop.optimizer.zero_grad()


def own_modulo(loop: Loop) -> None:
    """S4: ``loss / K`` by hand, an Accelerator with 1 step and an own modulo."""
    for index, (x,) in enumerate(loop.loader, start=1):
        with loop.accelerator.no_sync(loop.model) if index % STEPS else contextlib.nullcontext():
            loop.accelerator.backward(loop.model(x).mean() / STEPS)
        if index % STEPS == 0:
            loop.optimizer.step()
            loop.optimizer.zero_grad()


def constant_normalizer(loop: Loop) -> None:
    """S6: the sum over tokens, divided by the batch and the longest sequence whatever is in them."""
    for tokens, labels in loop.loader:
        with loop.accelerator.accumulate(loop.model):
            logits = loop.model(tokens)
            each = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
            loop.accelerator.backward(each.sum() / (labels.shape[0] * 7))
            loop.optimizer.step()
            loop.optimizer.zero_grad()


def contrastive(loop: Loop) -> None:
    """S10: each rank compares all ranks' embeddings; the world size undoes the wrapper's average."""
    for tokens, _ in loop.loader:
        with loop.accelerator.accumulate(loop.model):
            embedded = loop.model(tokens).mean(1)
            every = torch.cat(all_gather(embedded, dist.group.WORLD)) if dist.is_initialized() else embedded
            scores = every @ every.t() / 0.1
            loss = functional.cross_entropy(scores, torch.arange(len(every)).flip(0))
            loop.accelerator.backward(loss * number_of_ranks())
            loop.optimizer.step()
            loop.optimizer.zero_grad()


def gradients_multiplied(loop: Loop) -> None:
    """S11: fairseq's way: a plain sum, and gradients multiplied by ``n / N`` when the window is full."""
    for batches in windows(loop.loader, STEPS):
        units = torch.zeros((), dtype=torch.float64)
        for index, (tokens, labels) in enumerate(batches):
            last = index == len(batches) - 1
            with contextlib.nullcontext() if last or loop.ranks == 1 else loop.model.no_sync():
                logits = loop.model(tokens)
                loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
                loop.accelerator.backward(loss)
            units += (labels != -100).sum()
        factor = number_of_ranks() / everywhere(units)
        for parameter in loop.model.parameters():
            parameter.grad.mul_(factor)
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def toggled(loop: Loop) -> None:
    """S14: nanoGPT: ``loss / K``, DDP's flag toggled by hand, a plain backward."""
    for index, (x,) in enumerate(loop.loader, start=1):
        if loop.ranks > 1:
            loop.model.require_backward_grad_sync = index % STEPS == 0
        (loop.model(x).mean() / STEPS).backward()
        if index % STEPS == 0:
            loop.optimizer.step()
            loop.optimizer.zero_grad(set_to_none=True)


def synchronized_every_time(loop: Loop) -> None:
    """S17: combining the ranks at every microbatch is right, and only slow."""
    for index, (x,) in enumerate(loop.loader, start=1):
        loop.accelerator.backward(loop.model(x).mean() / STEPS)
        if index % STEPS == 0:
            loop.optimizer.step()
            loop.optimizer.zero_grad()


WHOLE = {"batch": BATCH, "steps": STEPS, "examples": 2 * STEPS * BATCH}
TOKENS = {"model": network, "batch": 2, "steps": 3, "sequences": 14}


def horizon(opt: torch.optim.Optimizer, windows: int = 2) -> LinearLR:
    """S21: prepared schedulers move ``n`` times per optimizer step, and this length counts on that."""
    return LinearLR(opt, 1.0, 0.5, total_iters=windows * number_of_ranks())


def constant(opt: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(opt, lambda step: 1.0)


CASES: dict[str, tuple[Callable[[Loop], Any], dict[str, Any]]] = {
    "S1": (documented_recipe, TOKENS),
    "S3": (unguarded, {**WHOLE, "scheduler": constant}),
    "S4": (own_modulo, {**WHOLE, "steps": 1}),
    "S6": (constant_normalizer, {**TOKENS, "sequences": 18}),
    "S10": (contrastive, {**TOKENS, "sequences": 18}),
    "S11": (gradients_multiplied, {**TOKENS, "steps": 1}),
    "S14": (toggled, {**WHOLE, "steps": 1}),
    "S17": (synchronized_every_time, {**WHOLE, "steps": 1}),
    "S21": (unguarded, {**WHOLE, "scheduler": horizon}),
}


def runs_of(name: str, n: int) -> list[tuple[Callable[[Loop], Any], dict[str, Any]]]:
    """The case without the hook, with it attached before ``prepare()``, and with it attached afterwards."""
    loop, keywords = CASES[name]
    keywords = dict(keywords)
    if "sequences" in keywords:
        keywords["data"] = sequences(n * keywords.pop("sequences"))
    else:
        keywords["num"] = n * keywords.pop("examples")
    modes = ({"mode": None}, {"mode": "fix", "when": "before"}, {"mode": "fix", "when": "after"})
    return [(loop, {**keywords, **mode}) for mode in modes]


def check(name: str, bare: Result, before: Result, after: Result) -> None:
    assert len(bare.gradients) >= 2, name
    for watched in (before, after):
        assert watched.alarms == [], name
        assert watched.gradients == bare.gradients, name  # to the last bit
        assert len(watched.windows) == len(bare.gradients), name
        assert [w.correction for w in watched.windows] == [1.0] * len(bare.gradients), name
        assert {f.code for f in watched.findings} <= {"ACC207", "ACC302"}, name


@pytest.mark.parametrize("name", CASES)
def test_one_process(name: str) -> None:
    check(name, *ranked(0, 1, runs_of(name, 1)))


@pytest.mark.parametrize("n", [2, 3])
def test_real_ranks(ranks: Callable[..., list[list[Result]]], n: int) -> None:
    runs = [run for name in CASES for run in runs_of(name, n)]
    for results in ranks(n, ranked, runs):
        for index, name in enumerate(CASES):
            check(name, *results[3 * index : 3 * index + 3])


def test_recipes_are_really_correct() -> None:
    """What is called correct above is: the gradient is the full batch's."""
    documented, multiplied = ranked(0, 1, [runs_of("S1", 1)[1], runs_of("S11", 1)[1]])
    meant = torch.tensor(full_batch(sequences(14), windows_of(14, 6)))
    torch.testing.assert_close(torch.tensor(documented.gradients), meant, rtol=1e-10, atol=1e-14)
    meant = torch.tensor(full_batch(sequences(14), windows_of(14, 8)))
    torch.testing.assert_close(torch.tensor(multiplied.gradients), meant, rtol=1e-10, atol=1e-14)
