"""The update does not depend on the split: every cell of the design's table, on a real Trainer and real ranks.

Cells are ``(loss, reduction)``: divided by the global batch or by the local one, ranks summed or averaged. The gradient
of each corrected window is compared with that of all its examples in one batch on one process, from the same weights.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from lightning_loops import Run, fit, network
from test_lightning_cases import hooked

LIMITS = {torch.float64: 1e-12, torch.float32: 1e-6}


def labelled(sizes, dtype, seed, dropped=0):
    """Batches of ``sizes`` examples; in each, up to ``dropped`` labels do not count."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for size in sizes:
        labels = torch.randint(0, 4, (size,), generator=generator)
        labels[: int(torch.randint(0, min(dropped, size - 6) + 1, (), generator=generator)) if dropped else 0] = -100
        batches.append((torch.randn(size, 6, generator=generator, dtype=dtype), labels))
    return batches


def local_mean(loop, batch, index):
    return F.cross_entropy(loop.model(batch[0]), batch[1])


def masked_mean(loop, batch, index):
    mask = batch[1] != -100
    losses = F.cross_entropy(loop.model(batch[0]), batch[1], reduction="none", ignore_index=-100)
    return (losses * mask).sum() / mask.sum()


def global_mean(loop, batch, index):
    """The sum over this rank, divided by the count of this microbatch over all ranks."""
    count = (batch[1] != -100).sum()
    if dist.is_initialized():
        dist.all_reduce(count)
    return F.cross_entropy(loop.model(batch[0]), batch[1], reduction="sum") / count


STEPS = {"local": local_mean, "masked": masked_mean, "global": global_mean}


def window_gradients(weights, batches, K, dtype):
    """One batch on one process for each window, from the weights that the run had: what was meant."""
    meant = []
    per_rank = [[row[i : i + K] for i in range(0, len(row), K)] for row in batches]
    for index, vector in enumerate(weights):
        model = network(dtype)
        torch.nn.utils.vector_to_parameters(vector, model.parameters())
        window = [batch for row in per_rank for batch in row[index]]
        features, labels = (torch.cat(parts) for parts in zip(*window))
        F.cross_entropy(model(features), labels).backward()
        meant.append(torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()]))
    return meant


class Remembered(torch.optim.SGD):
    """Keeps the weights it stepped from."""

    def __init__(self, parameters, weights) -> None:
        super().__init__(parameters, lr=0.1)
        self.weights = weights

    def step(self, closure=None):
        flat = [p.detach().reshape(-1) for group in self.param_groups for p in group["params"]]
        self.weights.append(torch.cat(flat).clone())
        return super().step(closure)


def deviation(rank: int, case: dict) -> tuple[float, Run]:
    """Train the case; return the largest deviation of a window's gradient, relative to its largest element."""
    weights: list[torch.Tensor] = []
    run = fit(
        STEPS[case["loss"]],
        case["batches"][rank],
        K=case["K"],
        model=network(case["dtype"]),
        optimizers=lambda loop: Remembered(loop.parameters(), weights),
        started=hooked if case["summed"] and len(case["batches"]) > 1 else None,
    )
    meant = window_gradients(weights, case["batches"], case["K"], case["dtype"])
    assert len(meant) == len(run.grads) > 0
    return max(float((seen - want).abs().max() / want.abs().max()) for seen, want in zip(run.grads, meant)), run


def worst(rank: int, n: int, cases: dict[str, dict]) -> dict[str, float]:
    torch.set_num_threads(1)
    found = {}
    for name, case in cases.items():
        found[name], run = deviation(rank, case)
        assert "ACC902" not in [finding.code for finding in run.findings], (name, run.findings)
    return found


def table(n: int) -> dict[str, dict]:
    """Every cell, at each ``K``, with even batches, and with an incomplete last window."""
    cases = {}
    for K in (1, 3, 5):
        for loss in ("local", "global"):
            for summed in (False, True) if n > 1 else (False,):
                for dtype in LIMITS:
                    batches = [labelled([4] * (2 * K + K // 2), dtype, 10 * K + rank) for rank in range(n)]
                    name = f"{loss} {'sum' if summed else 'mean'} K={K} {dtype}"
                    cases[name] = {"loss": loss, "summed": summed, "K": K, "dtype": dtype, "batches": batches}
    return cases


@st.composite
def splits(draw, n: int) -> dict[str, object]:
    """Ragged batches, token counts, incomplete windows; no count of all ranks looks like another number."""
    K, dtype = draw(st.sampled_from([1, 2, 3, 5])), draw(st.sampled_from(list(LIMITS)))
    length = draw(st.integers(1, 2 * K + 1))
    sizes = draw(st.lists(st.lists(st.integers(6, 10), min_size=length, max_size=length), min_size=n, max_size=n))
    dropped, seed = draw(st.sampled_from([0, 4])), draw(st.integers(0, 1000))
    return {
        "loss": draw(st.sampled_from(list(STEPS))),
        "summed": draw(st.booleans()),
        "K": K,
        "dtype": dtype,
        "batches": [labelled(row, dtype, 31 * seed + rank, dropped) for rank, row in enumerate(sizes)],
    }


def check(results: list[dict[str, float]], cases: dict[str, dict]) -> None:
    for dtype, limit in LIMITS.items():
        seen = {name: max(result[name] for result in results) for name in cases if cases[name]["dtype"] is dtype}
        assert {name: value for name, value in seen.items() if not value <= limit} == {}


@pytest.mark.parametrize("n", [1, 2, 3])
def test_every_cell_of_the_table(ranks, n):
    check(ranks(n, worst, table(n)), table(n))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_drawn_splits(ranks, n):
    @settings(max_examples=1, deadline=None, derandomize=True, phases=[Phase.generate])
    @given(st.lists(splits(n), min_size=14, max_size=14))
    def run(drawn):
        cases = {f"{place}: {_shown(case)}": case for place, case in enumerate(drawn)}
        check(ranks(n, worst, cases), cases)

    run()


def _shown(case) -> str:
    sizes = [[int((labels != -100).sum()) for _, labels in row] for row in case["batches"]]
    return f"{ {name: value for name, value in case.items() if name != 'batches'} } {sizes}"
