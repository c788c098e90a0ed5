"""What must be found in hand-written Accelerate loops, with its exact factor, and put right."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import accelerate_loops
import pytest
import torch
import torch.distributed as dist
from accelerate_loops import Loop, Result, full_batch, means, network, ranked, sequences, token_mean, windows_of
from torch import Tensor

STEPS, BATCH = 4, 5  # K and b; n is 1, 2 or 3


def accumulating(loss: Callable[[Loop, Tensor], Tensor]) -> Callable[[Loop], None]:
    """The loop of accelerate's guide around a loss of one batch."""

    def run(loop: Loop) -> None:
        for (x,) in loop.loader:
            with loop.accelerator.accumulate(loop.model):
                loop.accelerator.backward(loss(loop, x))
                loop.optimizer.step()
                loop.optimizer.zero_grad()

    return run


def everywhere(number: float | Tensor) -> Tensor:
    """A number added up over the ranks, without autograd."""
    total = torch.as_tensor(float(number), dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total


def value_of_all_ranks(loop: Loop, x: Tensor) -> Tensor:
    """The global sum as a value, the gradient of the local one."""
    loss = loop.model(x).sum()
    if dist.is_initialized():
        dist.all_reduce(loss.data)
    return loss / everywhere(len(x))


def cleared_first(loop: Loop) -> None:
    for (x,) in loop.loader:
        with loop.accelerator.accumulate(loop.model):
            loop.optimizer.optimizer.zero_grad()
            loop.accelerator.backward(loop.model(x).mean())
            loop.optimizer.step()


def cleared_first_prepared(loop: Loop) -> None:
    """The prepared ``zero_grad()`` waits for the window's end: at the last microbatch it clears all the others."""
    for (x,) in loop.loader:
        with loop.accelerator.accumulate(loop.model):
            loop.optimizer.zero_grad()
            loop.accelerator.backward(loop.model(x).mean())
            loop.optimizer.step()


def own_backward(loop: Loop) -> None:
    for (x,) in loop.loader:
        with loop.accelerator.accumulate(loop.model):
            loop.model(x).mean().backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()


divided_twice = accumulating(lambda loop, x: loop.model(x).mean() / loop.steps)
divided_by_attribute = accumulating(lambda loop, x: loop.model(x).mean() / loop.accelerator.gradient_accumulation_steps)
global_mean = accumulating(lambda loop, x: loop.model(x).sum() / everywhere(len(x)))
times_processes = accumulating(lambda loop, x: loop.model(x).mean() * loop.accelerator.num_processes)
reduced_value = accumulating(value_of_all_ranks)
correct = accumulating(lambda loop, x: loop.model(x).mean())


def token_means(loop: Loop) -> None:
    for tokens, labels in loop.loader:
        with loop.accelerator.accumulate(loop.model):
            loop.accelerator.backward(token_mean(loop.model(tokens), labels))
            loop.optimizer.step()
            loop.optimizer.zero_grad()


def both_modes(loop: Callable[[Loop], Any], **keywords: Any) -> list[tuple[Callable[[Loop], Any], dict[str, Any]]]:
    """A run that only reports, hook attached after ``prepare()``, and one that corrects, attached before it."""
    modes = ({"mode": "warn", "when": "after"}, {"mode": "fix", "when": "before"})
    return [(loop, {**keywords, **mode}) for mode in modes]


CASES: dict[str, tuple[Callable[[Loop], Any], Callable[[int], float], set[str]]] = {
    "A1": (divided_twice, lambda n: 1 / STEPS, {"ACC103"}),
    "A1 attribute": (divided_by_attribute, lambda n: 1 / STEPS, {"ACC103"}),
    "A4": (own_backward, lambda n: STEPS, {"ACC104", "ACC208"}),
    "A7": (global_mean, lambda n: 1 / n, {"ACC101"}),
    "A8": (times_processes, lambda n: n, {"ACC102"}),
    "A11": (reduced_value, lambda n: 1 / n, {"ACC101"}),
}


def check(name: str, n: int, warned: Result, fixed: Result) -> None:
    """The factor is what the gradient shows without correction, and what the finding says; with it nothing is off."""
    _, factor_of, codes = CASES[name]
    factor = factor_of(n)
    meant = means(2 * n * STEPS * BATCH, n * STEPS * BATCH)
    assert warned.scalars == pytest.approx([factor * mean for mean in meant], rel=1e-12), name
    assert fixed.scalars == pytest.approx(meant, rel=1e-12), name
    expected = codes if factor != 1 else set()
    for result in (warned, fixed):
        assert set(result.seen) == expected, name
        assert all(found == pytest.approx(factor) for code, found in result.seen.items() if code != "ACC208"), name
        assert [w.gradient_scale for w in result.windows] == pytest.approx([factor, factor]), name
        assert [w.effective_batch for w in result.windows] == [n * STEPS * BATCH] * 2, name
    assert {f.action for f in fixed.alarms if f.code != "ACC208"} <= {"corrected"}, name
    assert {f.action for f in warned.alarms} <= {"reported"}, name
    assert [w.correction for w in fixed.windows] == pytest.approx([1 / factor] * 2), name


@pytest.mark.parametrize("name", CASES)
def test_scale_on_one_process(name: str) -> None:
    runs = both_modes(CASES[name][0], steps=STEPS, batch=BATCH, num=2 * STEPS * BATCH)
    check(name, 1, *ranked(0, 1, runs))


@pytest.mark.parametrize("n", [2, 3])
def test_scale_on_real_ranks(ranks: Callable[..., list[list[Result]]], n: int) -> None:
    sizes = {"steps": STEPS, "batch": BATCH, "num": 2 * n * STEPS * BATCH}
    runs = [run for loop, _, _ in CASES.values() for run in both_modes(loop, **sizes)]
    results = ranks(n, ranked, runs)
    for index, name in enumerate(CASES):
        check(name, n, *results[0][2 * index : 2 * index + 2])
    for other in results[1:]:
        assert [run.gradients for run in other] == [run.gradients for run in results[0]]
        assert [run.findings for run in other] == [run.findings for run in results[0]]


@pytest.mark.parametrize("loop", [cleared_first, cleared_first_prepared])
def test_gradients_cleared_first_thing_in_the_block(loop: Callable[[Loop], None]) -> None:
    (result,) = ranked(0, 1, [(loop, {"steps": STEPS, "batch": BATCH, "num": 2 * STEPS * BATCH})])
    assert result.seen == {"ACC201": 1 / STEPS}
    survivors = means(2 * STEPS * BATCH, BATCH)[STEPS - 1 :: STEPS]  # the last microbatch of each window, divided by K
    assert result.scalars == pytest.approx([mean / STEPS for mean in survivors])


def test_window_of_one_microbatch_at_the_end() -> None:
    sizes = {"steps": STEPS, "batch": BATCH, "num": 5 * BATCH}
    warned, fixed = ranked(0, 1, both_modes(correct, **sizes))
    meant = means(5 * BATCH, STEPS * BATCH)
    assert warned.scalars == pytest.approx([meant[0], meant[1] / STEPS])
    assert fixed.scalars == pytest.approx(meant)
    assert warned.seen == fixed.seen == {"ACC105": 1 / STEPS}
    assert [w.microbatches for w in fixed.windows] == [STEPS, 1]
    assert fixed.windows[1].correction == pytest.approx(STEPS)


def test_window_at_the_end_on_top_of_a_second_division() -> None:
    sizes = {"steps": STEPS, "batch": BATCH, "num": 5 * BATCH}
    warned, fixed = ranked(0, 1, both_modes(divided_twice, **sizes))
    assert warned.seen == fixed.seen == {"ACC103": 1 / STEPS, "ACC105": 1 / STEPS}
    assert fixed.scalars == pytest.approx(means(5 * BATCH, STEPS * BATCH))
    assert warned.windows[1].gradient_scale == pytest.approx(1 / STEPS**2)


RAGGED = functools.partial(both_modes, token_means, model=network, steps=3, batch=2)


def check_ragged(n: int, warned: Result, fixed: Result) -> None:
    data, num = sequences(n * 14), n * 14  # windows of 3 microbatches; the last one is not whole
    meant = torch.tensor(full_batch(data, windows_of(num, n * 6)))
    seen, put_right = torch.tensor(warned.gradients), torch.tensor(fixed.gradients)
    torch.testing.assert_close(put_right, meant, rtol=1e-10, atol=1e-14)
    cosine = torch.nn.functional.cosine_similarity(seen, meant)
    assert (cosine < 1 - 1e-4).any()  # no single factor would have done
    codes = {"ACC105", "ACC106"} | ({"ACC107"} if n > 1 else set())
    assert codes <= set(warned.seen) and codes <= set(fixed.seen)
    assert max(w.weight_spread for w in warned.windows) > 1.2


def test_token_means_over_ragged_microbatches() -> None:
    check_ragged(1, *ranked(0, 1, RAGGED(data=sequences(14))))


@pytest.mark.parametrize("n", [2, 3])
def test_token_means_over_ragged_ranks(ranks: Callable[..., list[list[Result]]], n: int) -> None:
    results = ranks(n, ranked, RAGGED(data=sequences(n * 14)))
    for result in results:
        check_ragged(n, *result)


def test_raise_stops_before_the_first_wrong_step() -> None:
    from accum_plugin.boundary import AccumulationError

    steps_seen: list[Tensor] = []

    def loop(loop: Loop) -> None:
        loop.optimizer.optimizer.register_step_post_hook(lambda *_: steps_seen.append(1))
        divided_twice(loop)

    with pytest.raises(AccumulationError, match="ACC103"):
        accelerate_loops.train(loop, mode="raise")
    assert not steps_seen
