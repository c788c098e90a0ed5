"""Counted budgets: collectives and their bytes, host reads, passes over the gradients. Counted, never timed."""

from __future__ import annotations

import warnings

import torch
from torch.utils._python_dispatch import TorchDispatchMode

WINDOWS, K = 8, 3


class HostReads(TorchDispatchMode):
    """Counts reads of a tensor's value on the host (``item``, ``bool``, ``float``)."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reads += "_local_scalar_dense" in str(func)
        return func(*args, **(kwargs or {}))


def count(rank: int, n: int, attach: bool = True, wrong: bool = False) -> list[dict[str, int]]:
    """Train ``WINDOWS`` windows; return what each cost."""
    import torch.distributed as dist
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    from accum_plugin.accelerate import AccumulationHook

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=K)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
    hook = AccumulationHook.attach(accelerator, log_every_n_steps=1000) if attach else None
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    now = {"collectives": 0, "bytes": 0, "passes": 0, "norms": 0, "reads": 0}
    reduce, multiply, norm = dist.all_reduce, torch._foreach_mul_, torch._foreach_norm

    def all_reduce(tensor, *args, **kwargs):
        now["collectives"] += 1
        now["bytes"] = max(now["bytes"], tensor.numel() * tensor.element_size())
        return reduce(tensor, *args, **kwargs)

    def foreach_mul(*args, **kwargs):
        now["passes"] += 1
        return multiply(*args, **kwargs)

    def foreach_norm(*args, **kwargs):
        now["norms"] += 1
        return norm(*args, **kwargs)

    costs = []
    dist.all_reduce, torch._foreach_mul_, torch._foreach_norm = all_reduce, foreach_mul, foreach_norm
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(WINDOWS):
                now.update(dict.fromkeys(now, 0))
                with HostReads() as mode:
                    for _ in range(K):
                        with accelerator.accumulate(model):
                            loss = model(torch.randn(5, 4)).square().mean()
                            accelerator.backward(loss / K if wrong else loss)
                            if accelerator.sync_gradients:
                                accelerator.clip_grad_norm_(model.parameters(), 100.0)
                            optimizer.step()
                            optimizer.zero_grad()
                costs.append({**now, "reads": mode.reads})
    finally:
        dist.all_reduce, torch._foreach_mul_, torch._foreach_norm = reduce, multiply, norm
        if hook is not None:
            assert len(hook.windows) == WINDOWS and hook.session.failed is None
            hook.detach()
    return costs


def test_correct_code_costs_nothing_on_one_process(ranks):
    (with_plugin,), (bare,) = ranks(1, count), ranks(1, count, False)
    for cost, usual in zip(with_plugin, bare):
        assert cost["collectives"] == 0
        assert cost["passes"] == usual["passes"]  # what clipping itself does
        assert cost["norms"] == usual["norms"]  # the norm is computed once and shared with clipping
    assert [c["reads"] for c in with_plugin[4:]] == [c["reads"] for c in bare[4:]]


def test_two_ranks_exchange_once_per_step(ranks):
    for costs in ranks(2, count):
        assert all(cost["collectives"] <= 3 for cost in costs[:1])
        assert [cost["collectives"] for cost in costs[1:]] == [1] * (WINDOWS - 1)
        assert all(0 < cost["bytes"] <= 256 for cost in costs)


def test_a_correction_is_one_pass(ranks):
    (wrong,), (bare,) = ranks(1, count, True, True), ranks(1, count, False, True)
    assert {cost["passes"] - usual["passes"] for cost, usual in zip(wrong, bare)} == {1}
