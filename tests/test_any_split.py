"""Any split: the corrected gradient of a drawn run equals that of all its examples in one batch on one process.

Drawn are the ranks, the accumulation steps, ragged batches and lengths, microbatches without a single target, the
loss, the dtype, autocast, clipping, one optimizer or two, weight tying, frozen parts and activation checkpointing. A
few dozen cases run by default, 2,400 with ``pytest -m nightly``.
"""

from __future__ import annotations

import copy
import random
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH = 11, 6


class Tokens(nn.Module):
    def __init__(self, tied: bool, frozen: bool, checkpointed: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.checkpointed = checkpointed
        if tied:
            self.head.weight = self.embed.weight
        elif frozen:
            self.embed.weight.requires_grad_(False)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        hidden = checkpoint(self.body, hidden, use_reentrant=False) if self.checkpointed else self.body(hidden)
        return self.head(hidden)


def unit_losses(logits, targets):
    return nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none", ignore_index=-100)


def ignored_mean(logits, targets):
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def masked_mean(logits, targets):
    mask = targets != -100
    return (unit_losses(logits, targets) * mask).sum() / mask.sum()


def indexed_mean(logits, targets):
    return unit_losses(logits, targets)[targets != -100].mean()


def half_of_a_mean(logits, targets):
    return 0.5 * ignored_mean(logits, targets)


def clamped_mean(logits, targets):
    mask = targets != -100
    return (unit_losses(logits, targets) * mask).sum() / mask.sum().clamp(min=1)


LIMITS = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 5e-2}  # the last: autocast
LOSSES = {
    "clamped": clamped_mean,
    "ignored": ignored_mean,
    "masked": masked_mean,
    "indexed": indexed_mean,
    "half": half_of_a_mean,
}


def draw(seed: int, n: int) -> dict:
    rng = random.Random(seed)
    dtype = rng.choice([torch.float64] * 5 + [torch.float32] * 3 + [torch.bfloat16])
    case = {
        "seed": seed,
        "K": rng.choice([1, 2, 3, 5]),
        "loss": rng.choice(list(LOSSES)),
        "dtype": dtype,
        "divide_twice": rng.random() < 0.3,
        "clip": rng.choice([None, None, 0.05]),
        "optimizers": rng.choice([1, 1, 2]),
        "model": (rng.random() < 0.3, rng.random() < 0.3, rng.random() < 0.3),
    }
    generator = torch.Generator().manual_seed(seed)
    rare = 0.3 if case["loss"] == "clamped" else 0.0
    case["batches"] = [[_batch(rng, generator, rng.random() < rare) for _ in range(case["K"])] for _ in range(n)]
    case["batches"][0][-1][1][0, 0] = 1  # somewhere there is a target
    return case


def _batch(rng: random.Random, generator: torch.Generator, empty: bool):
    rows, columns = rng.randint(1, 4), rng.randint(1, 7)
    tokens = torch.randint(0, VOCABULARY, (rows, columns), generator=generator)
    targets = torch.randint(0, VOCABULARY, (rows, columns), generator=generator)
    targets[torch.rand((rows, columns), generator=generator) < 0.3] = -100
    targets[0, 0] = 1  # a mean over no target at all is not a number, with the plugin and without
    return tokens, torch.full_like(targets, -100) if empty else targets


def autocast(case: dict):
    return torch.autocast("cpu", torch.bfloat16, enabled=case["dtype"] is torch.bfloat16)


def reference(model: nn.Module, case: dict) -> list:
    """All units of the window, on all ranks, in one mean."""
    pairs = [pair for row in case["batches"] for pair in row]
    with autocast(case):
        losses = [unit_losses(model(tokens), targets).sum() for tokens, targets in pairs]
    count = sum(int((targets != -100).sum()) for _, targets in pairs)
    (sum(losses) / count * (0.5 if case["loss"] == "half" else 1.0)).backward()
    if case["clip"]:
        nn.utils.clip_grad_norm_(model.parameters(), case["clip"])
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def run(rank: int, n: int, case: dict) -> float:
    """Train one window for real; return the largest deviation from the reference, relative to its largest element."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    from accum_plugin.accelerate import AccumulationHook

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    torch.manual_seed(case["seed"])
    model = Tokens(*case["model"]).to(torch.float32 if case["dtype"] is torch.bfloat16 else case["dtype"])
    meant = reference(copy.deepcopy(model), case)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=case["K"])
    hook = AccumulationHook.attach(accelerator)
    trained = [p for p in model.parameters() if p.requires_grad]
    shares = [trained[i :: case["optimizers"]] for i in range(case["optimizers"])]
    made = [torch.optim.SGD(share, lr=0.0) for share in shares if share]
    wrapped, *optimizers = accelerator.prepare(model, *made)
    for tokens, targets in case["batches"][rank]:
        with accelerator.accumulate(wrapped):
            with autocast(case):
                loss = LOSSES[case["loss"]](wrapped(tokens), targets)
            accelerator.backward(loss / case["K"] if case["divide_twice"] else loss)
            if accelerator.sync_gradients and case["clip"]:
                accelerator.clip_grad_norm_(model.parameters(), case["clip"])
            for optimizer in optimizers:
                optimizer.step()
    assert hook.last_window is not None and not any(f.code == "ACC902" for f in hook.findings), hook.findings
    seen = [p.grad for p in model.parameters()]
    hook.detach()
    assert [a is None for a in seen] == [b is None for b in meant]
    pairs = [(a, b) for a, b in zip(seen, meant) if a is not None]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-300)) for a, b in pairs)


def worst(rank: int, n: int, first: int, count: int) -> list:
    torch.set_num_threads(1)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(first, first + count):
            case = draw(seed, n)
            deviation = run(rank, n, case)
            if not deviation <= LIMITS[case["dtype"]]:
                shown = {key: value for key, value in case.items() if key != "batches"}
                found.append((deviation, shown))
    return found


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_few_dozen_splits(ranks, n):
    for failures in ranks(n, worst, 1000 * n, 14, timeout=240):
        assert failures == []


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("part", range(4))
def test_two_thousand_splits(ranks, n, part):
    for failures in ranks(n, worst, 100_000 * n + 200 * part, 200, timeout=900):
        assert failures == []
