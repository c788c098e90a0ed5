"""The sentinel: a few gradient elements, followed from backward to the step, that never change a gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accum_plugin.measurement import measure
from accum_plugin.sentinel import ELEMENTS, SLOTS, WATCHED, Sentinel


def model(dtype=torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(2, 1, bias=False)).to(dtype)


def backward(net: nn.Module, count: int = 1) -> None:
    for step in range(count):
        net(torch.full((4, 3), 1.0 + step, dtype=next(net.parameters()).dtype)).sum().backward()


def fitted(sentinel: Sentinel):
    mine, grads, sizes, _ = sentinel.sample()
    return measure(mine, grads, sum(g * g for g in grads), sum(sizes), 1, sentinel.epsilon)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_contributions_add_up_to_the_gradient(dtype):
    net = model(dtype)
    sentinel = Sentinel(net.parameters())
    backward(net, 3)
    seen = fitted(sentinel)
    assert seen.scalar and seen.ratio == pytest.approx(1.0, rel=1e-12 if dtype is torch.float64 else 2e-2)


@pytest.mark.parametrize("factor", [0.5, 3.0, -1.0])
def test_a_scaling_after_backward_is_measured(factor):
    net = model()
    sentinel = Sentinel(net.parameters())
    backward(net, 2)
    for parameter in net.parameters():
        parameter.grad.mul_(factor)
    assert fitted(sentinel).ratio == pytest.approx(factor, rel=1e-12)


def test_gradients_that_another_loss_touched_are_no_single_multiple():
    net = model()
    sentinel = Sentinel(net.parameters())
    backward(net)
    for parameter in net.parameters():
        parameter.grad.add_(torch.arange(parameter.numel(), dtype=torch.float64).view_as(parameter))
    assert not fitted(sentinel).scalar


@pytest.mark.parametrize("set_to_none", [True, False])
def test_clearing_between_microbatches_is_noted(set_to_none):
    net = model()
    sentinel = Sentinel(net.parameters())
    backward(net)
    net.zero_grad(set_to_none=set_to_none)
    assert not sentinel.cleared
    backward(net)
    assert sentinel.cleared and fitted(sentinel).ratio == pytest.approx(1.0)


def test_gradients_left_over_are_stale_until_cleared():
    net = model()
    sentinel = Sentinel(net.parameters())
    backward(net)
    sentinel.start_window()
    backward(net)
    assert sentinel.stale
    sentinel.start_window()
    net.zero_grad()
    backward(net)
    assert not sentinel.stale


def test_every_parameter_that_gets_gradients_is_covered_in_time():
    net = model()
    net[1].weight.requires_grad_(False)
    sentinel, seen = Sentinel(net.parameters()), set()
    backward(net)
    alive = {id(p) for p in net.parameters() if p.requires_grad}
    for _ in range(len(alive)):
        seen |= {id(watch.parameter) for watch in sentinel._watches}
        assert len(sentinel._watches) <= WATCHED
        sentinel.rotate()
    assert seen == alive


def test_it_sends_a_fixed_number_of_numbers_and_leaves_no_hook():
    for parameters in ([nn.Parameter(torch.zeros(()))], list(model().parameters())):
        sentinel = Sentinel(parameters)
        mine, grads, sizes, _ = sentinel.sample()
        assert len(mine) == len(grads) == len(sizes) == SLOTS == WATCHED * ELEMENTS
        sentinel.remove()
        assert all(not p._backward_hooks for p in parameters)


def test_ranks_that_follow_the_same_elements_have_one_identity():
    one, other = Sentinel(model().parameters()), Sentinel(model().parameters())
    identities = set()
    for _ in range(4):
        assert one.sample()[3] == other.sample()[3]
        identities.add(one.sample()[3])
        one.rotate(), other.rotate()
    assert len(identities) > 1


def test_bit_identical_gradients_with_and_without():
    plain, watched = model(torch.float32), model(torch.float32)
    sentinel = Sentinel(watched.parameters())
    for _ in range(3):
        backward(plain, 2), backward(watched, 2)
        sentinel.rotate()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), watched.parameters()))


def test_sparse_gradients_are_left_out():
    table = nn.Embedding(4, 3, sparse=True)
    sentinel = Sentinel(table.parameters())
    table(torch.tensor([1, 2])).sum().backward()
    mine, grads, _, _ = sentinel.sample()
    assert sentinel.error is None and not any(mine) and not any(grads)
