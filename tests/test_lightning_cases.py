"""Mistakes that people made with a real Trainer: each is found with its exact factor, and corrected where it can be.

The scalar weight's gradient is the weighted mean of the examples, so the gradient meant is known without the plugin.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning_loops import Loop, Run, alone, examples, fit, fits, identical, network, numbers
from torch import nn

from accum_plugin.boundary import AccumulationError

X = numbers(1, 30)  # 6 microbatches of 5


def local_mean(loop, batch, index):
    return loop.model(batch).mean()


def summed(loop, batch, index):
    return loop.model(batch).sum()


def global_mean(loop, batch, index):
    """The sum over this rank's examples, divided by the examples of all ranks."""
    count = torch.tensor(float(len(batch)), dtype=torch.float64)
    dist.all_reduce(count)
    return loop.model(batch).sum() / count


def divided(step, number):
    return lambda loop, batch, index: step(loop, batch, index) / number


def by_hand(num_steps, *, raw=False, step=local_mean):
    """Manual optimization that never divides."""

    def training_step(loop, batch, index):
        loss = step(loop, batch, index)
        loss.backward() if raw else loop.manual_backward(loss)
        if (index + 1) % num_steps == 0:
            loop.optimizers().step()
            loop.optimizers().zero_grad()

    return training_step


def sum_hook(state, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def hooked(loop: Loop) -> None:
    loop.trainer.strategy.model.register_comm_hook(None, sum_hook)


def gradients(run: Run) -> list[float]:
    return [float(grad) for grad in run.grads]


def means(x, size):
    return [float(part.mean()) for part in x.split(size)]


def both(step, batches, **job) -> tuple[Run, Run]:
    """The run in modes warn and fix; warn changes nothing."""
    bare, warn, fix = (alone(step=step, batches=batches, mode=mode, **job) for mode in (None, "warn", "fix"))
    assert identical(bare, warn)
    assert [f.code for f in warn.findings] == [f.code for f in fix.findings]
    return warn, fix


# -- one process ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("K", [2, 3])
@pytest.mark.parametrize(
    "written",
    [
        lambda K: divided(local_mean, K),
        lambda K: divided(local_mean, torch.tensor(K)),
        lambda K: lambda s, b, i: s.model(b).mean() / s.trainer.accumulate_grad_batches,
        lambda K: lambda s, b, i: {"loss": s.model(b).mean() / K, "size": len(b)},
        lambda K: lambda s, b, i: (s.model(b) / K).mean(),
        lambda K: lambda s, b, i: s.model(b).sum() / len(b) / K,
        lambda K: lambda s, b, i: s.model(b).sum() / (len(b) * K),
        lambda K: lambda s, b, i: s.model(b).mean().div_(K),
    ],
    ids=["int", "int tensor", "trainer's", "dict", "inside", "sum/len/K", "sum/(len*K)", "in place"],
)
def test_l1_divided_by_the_loop_and_by_lightning(written, K):
    warn, fix = both(written(K), X.split(5), K=K)
    found = warn.finding("ACC103")
    assert found.certainty == "certain" and found.factor == pytest.approx(1 / K, rel=1e-12)
    assert warn.windows[0].gradient_scale == pytest.approx(1 / K, rel=1e-12)
    assert fix.finding("ACC103").action == "corrected" and fix.windows[0].correction == pytest.approx(K, rel=1e-12)
    assert gradients(fix) == pytest.approx(means(X, 5 * K), rel=1e-12)
    assert f"accumulate_grad_batches={K}" in found.message and len(fix.warned) == 1


def test_l1_division_by_a_float_is_suspected_and_left_alone():
    warn, fix = both(divided(local_mean, torch.tensor(3.0)), X.split(5), K=3)
    assert warn.finding("ACC103").certainty == "suspected" and identical(warn, fix)


@pytest.mark.parametrize("K", [2, 3])
def test_l2_manual_optimization_never_divides(K):
    warn, fix = both(by_hand(K), X.split(5), manual=True)
    assert warn.finding("ACC104").factor == pytest.approx(K, rel=1e-12)
    assert gradients(warn) == pytest.approx([K * mean for mean in means(X, 5 * K)], rel=1e-12)
    assert gradients(fix) == pytest.approx(means(X, 5 * K), rel=1e-12)


def test_l3_last_window_is_short():
    warn, fix = both(local_mean, numbers(1, 50).split(5), K=4)
    found = warn.finding("ACC105")
    assert found.factor == pytest.approx(0.5, rel=1e-12) and found.optimizer_step == 2
    assert gradients(fix) == pytest.approx([10.5, 30.5, 45.5], rel=1e-12)
    assert [w.gradient_scale for w in fix.windows] == pytest.approx([1, 1, 0.5], rel=1e-12)


def test_l4_epoch_shorter_than_the_window():
    warn, fix = both(local_mean, X.split(5)[:2], K=5, max_epochs=3)
    assert warn.finding("ACC105").factor == pytest.approx(2 / 5, rel=1e-12)
    assert gradients(fix) == pytest.approx([5.5] * 3, rel=1e-12)


def test_l3_and_l1_at_once_name_each_factor_and_the_product():
    warn, fix = both(divided(local_mean, 4), numbers(1, 50).split(5), K=4)
    assert warn.finding("ACC103").factor == pytest.approx(1 / 4)
    assert warn.finding("ACC105").factor == pytest.approx(1 / 2) and "0.125" in warn.finding("ACC105").message
    assert gradients(fix) == pytest.approx([10.5, 30.5, 45.5], rel=1e-12)


def ragged_tokens(loop, batch, index):
    """A token mean over padded rows: ``ignore_index`` marks the padding."""
    features, labels = batch
    labels = labels.clone()
    labels[: index % 3] = -100
    return F.cross_entropy(loop.model(features), labels)


def masked_tokens(loop, batch, index):
    features, labels = batch
    mask = (torch.arange(len(labels)) >= index % 3).to(features.dtype)
    return (F.cross_entropy(loop.model(features), labels, reduction="none") * mask).sum() / mask.sum()


@pytest.mark.parametrize("step", [ragged_tokens, masked_tokens])
def test_l5_token_means_over_ragged_microbatches(step):
    batches = list(zip(*(part.split(5) for part in examples(60))))
    warn, fix = both(step, batches, K=3, model=network)
    found = warn.finding("ACC106")
    assert found.certainty == "certain" and "1.67 times" in found.message
    assert fix.windows[0].weight_spread == pytest.approx(5 / 3)
    model, full = network(), []
    for index, (features, labels) in enumerate(batches[:3]):
        full.append(F.cross_entropy(model(features), labels, reduction="none")[index % 3 :])
    torch.cat(full).mean().backward()
    meant = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    assert (fix.grads[0] - meant).abs().max() < 1e-14
    assert (warn.grads[0] - meant).abs().max() > 1e-3


def penalty(loop):
    return 1e-2 * sum(parameter.pow(2).sum() for parameter in loop.model.parameters())


def with_penalty(loop, batch, index):
    return F.cross_entropy(loop.model(batch[0]), batch[1]) + penalty(loop)


def undivided_penalty(loop, batch, index):
    return F.cross_entropy(loop.model(batch[0]), batch[1]) / 3 + penalty(loop)


@pytest.mark.parametrize(
    ("step", "sizes", "code"),
    [
        (with_penalty, [5, 2, 7], "ACC106"),
        (with_penalty, [5, 5], "ACC105"),
        (divided(with_penalty, 3), [5, 5, 5], "ACC103"),
        (undivided_penalty, [5, 5, 5], "ACC103"),
    ],
)
def test_a_penalty_keeps_its_size_beside_a_corrected_term(step, sizes, code):
    features, labels = (part[: sum(sizes)] for part in examples(60))
    warn, fix = both(step, list(zip(features.split(sizes), labels.split(sizes))), K=3, model=network)
    assert warn.alarms() == [code]
    loop = Loop(network(), with_penalty)
    with_penalty(loop, (features, labels), 0).backward()
    meant = torch.cat([p.grad.reshape(-1) for p in loop.model.parameters()])
    assert (fix.grads[0] - meant).abs().max() < 1e-14


def test_l12_sum_loss_is_divided_by_lightning():
    warn, fix = both(summed, [numbers(1, 2), numbers(3, 4), numbers(5, 8)], K=3)
    found = warn.finding("ACC108")
    assert found.factor == pytest.approx(1 / 3) and found.certainty == "suspected"
    assert gradients(warn) == pytest.approx([12]) and identical(warn, fix)
    declared = fit(summed, [numbers(1, 4), numbers(5, 8)], K=2, keywords={"normalization": "sum"})
    assert gradients(declared) == pytest.approx([36.0], rel=1e-12)  # 18 without: the sum is 36


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.g = nn.Linear(2, 6).double()
        self.d = nn.Linear(6, 1).double()


def stale_critic(loop, batch, index):
    """The generator's backward pass leaves gradients in the critic, which clears its own right after its step only."""
    generator, critic = loop.optimizers()
    made = loop.model.g(batch[:, :2])
    loop.manual_backward(loop.model.d(made.detach()).pow(2).mean() - loop.model.d(batch).mean())
    critic.step()
    critic.zero_grad()
    loop.manual_backward(-loop.model.d(made).mean())
    generator.step()
    generator.zero_grad()


def two_adams(loop):
    return [torch.optim.Adam(part.parameters(), lr=0.01) for part in (loop.model.g, loop.model.d)]


def test_l13_gradients_left_over_by_another_optimizers_loss():
    job = {"model": Generator, "optimizers": two_adams, "manual": True}
    warn, fix = both(stale_critic, examples(30)[0].split(5), **job)
    found = warn.finding("ACC201")
    assert found.certainty == "certain" and found.optimizer_step == 1 and "another loss" in found.message
    assert identical(warn, fix)


def cleared_first(loop, batch, index):
    loop.optimizers().zero_grad()
    loop.manual_backward(loop.model(batch).mean())
    if (index + 1) % 3 == 0:
        loop.optimizers().step()


def test_gradients_cleared_at_every_microbatch():
    warn, _ = both(cleared_first, X.split(5), manual=True)
    assert warn.finding("ACC201").factor == pytest.approx(1 / 3)
    assert "1 of 3 microbatches" in warn.finding("ACC201").message


def test_l15_a_microbatch_without_a_loss():
    def sometimes(loop, batch, index):
        return None if index % 3 == 1 else loop.model(batch).mean()

    warn, fix = both(sometimes, X.split(5), K=3)
    assert warn.finding("ACC105").factor == pytest.approx(2 / 3, rel=1e-12)
    assert gradients(fix) == pytest.approx([8.0, 23.0], rel=1e-12)


def test_an_empty_microbatch_counts_for_nothing():
    def padded(loop, batch, index):
        mask = torch.full((len(batch),), float(index % 3 != 1), dtype=torch.float64)
        return (loop.model(batch) * mask).sum() / mask.sum().clamp(min=1)

    warn, fix = both(padded, X.split(5), K=3)
    assert warn.finding("ACC106").factor == pytest.approx(2 / 3, rel=1e-12)
    assert gradients(fix) == pytest.approx([8.0, 23.0], rel=1e-12)


def scaler():
    from lightning.pytorch.plugins import MixedPrecision

    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10))]}


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp16 clipped"])
def test_l1_in_half_precision(precision):
    batches = list(zip(*(part.split(5) for part in examples(30, torch.float32))))
    job = {"K": 3, "model": lambda: network(torch.float32), "fresh": scaler}
    if precision == "bf16":
        job |= {"fresh": None, "precision": "bf16-mixed"}
    if precision == "fp16 clipped":
        job |= {"gradient_clip_val": 0.05}

    def cross_entropy(loop, batch, index):
        return F.cross_entropy(loop.model(batch[0]), batch[1])

    right = alone(step=cross_entropy, batches=batches, mode=None, **job)
    warn, fix = both(divided(cross_entropy, 3), batches, **job)
    assert warn.finding("ACC103").factor == pytest.approx(1 / 3, rel=1e-6)
    assert torch.allclose(fix.grads[0], right.grads[0], rtol=2e-2, atol=1e-3)
    assert torch.allclose(fix.weights, right.weights, rtol=2e-2, atol=1e-3)


def test_raise_stops_before_the_first_wrong_step():
    seen = []
    with pytest.raises(AccumulationError) as stopped:
        fit(divided(local_mean, 3), X.split(5), K=3, mode="raise", optimizers=lambda loop: _remembering(loop, seen))
    assert [finding.code for finding in stopped.value.findings] == ["ACC103"] and not seen


def _remembering(loop, seen):
    optimizer = torch.optim.SGD(loop.parameters(), lr=0.125)
    optimizer.register_step_post_hook(lambda *_: seen.append(loop.model.w.item()))
    return optimizer


def test_ignored_rules_are_silent_and_leave_the_gradient_alone():
    batches = [numbers(1, 5), numbers(6, 7), numbers(8, 10)]
    run = fit(local_mean, batches, K=3, keywords={"ignore": ("ACC106",)})
    assert run.findings == [] and gradients(run) == pytest.approx([(3 + 6.5 + 9) / 3], rel=1e-12)


# -- real ranks -------------------------------------------------------------------------------------------------------


def ragged(n):
    sizes = [[5, 2, 4, 1], [1, 3, 3, 6], [2, 2, 6, 4]][:n]
    parts = numbers(1, sum(map(sum, sizes))).split([size for row in sizes for size in row])
    return [list(parts[4 * rank : 4 * rank + 4]) for rank in range(n)]


def ranks_jobs(n, K):
    x = numbers(1, 30 * n)
    even = [list(x[rank::n].split(5)) for rank in range(n)]
    return {
        "L1": {"step": divided(local_mean, K), "batches": even, "K": K},
        "L2": {"step": by_hand(K), "batches": even, "manual": True},
        "L3": {"step": local_mean, "batches": [part[:5] for part in even], "K": 4},
        "L5": {"step": local_mean, "batches": ragged(n), "K": 4},
        "L6": {"step": by_hand(K, raw=True), "batches": even, "manual": True},
        "L10": {"step": local_mean, "batches": even, "K": K, "started": hooked},
        "L11": {"step": summed, "batches": even},
        "ACC101": {"step": global_mean, "batches": even, "K": K},
        "times n": {"step": lambda s, b, i: s.model(b).mean() * dist.get_world_size(), "batches": even, "K": K},
        "two": {"step": divided(global_mean, K), "batches": even, "K": K},
    }


@pytest.mark.parametrize(("n", "K"), [(2, 3), (3, 2)])
def test_on_real_ranks(ranks, n, K):
    results = ranks(n, fits, ranks_jobs(n, K), ["warn", "fix", None], timeout=300)
    warn = {name: results[0][name, "warn"] for name in ranks_jobs(n, K)}
    fix = {name: results[0][name, "fix"] for name in ranks_jobs(n, K)}
    whole = means(numbers(1, 30 * n), 5 * K * n)
    for name in warn:
        assert all(identical(result[name, "warn"], result[name, None]) for result in results), name
        assert all(not result[name, "fix"].warned for result in results[1:]), name
        assert len(fix[name].warned) == len(fix[name].alarms()), name
        if name != "L6":
            assert all(identical(result[name, "fix"], results[0][name, "fix"]) for result in results), name
    for name, code, factor in [
        ("L1", "ACC103", 1 / K),
        ("L2", "ACC104", K),
        ("L10", "ACC102", n),
        ("ACC101", "ACC101", 1 / n),
        ("times n", "ACC102", n),
    ]:
        assert warn[name].alarms() == [code] and warn[name].finding(code).certainty == "certain", name
        assert warn[name].finding(code).factor == pytest.approx(factor, rel=1e-9), name
        assert fix[name].finding(code).action == "corrected" and gradients(fix[name]) == pytest.approx(whole, rel=1e-12)
    assert warn["L3"].finding("ACC105").factor == pytest.approx(1 / 4)
    short = float(numbers(1, 30 * n)[20 * n : 25 * n].mean())
    assert gradients(fix["L3"])[-1] == pytest.approx(short, rel=1e-12)
    assert {"ACC106", "ACC107"} <= set(warn["L5"].alarms())
    everything = torch.cat([part for row in ragged(n) for part in row])
    assert gradients(fix["L5"]) == pytest.approx([float(everything.mean())], rel=1e-12)
    assert fix["L5"].windows[0].weight_spread == pytest.approx(max(map(len, sum(ragged(n), []))), rel=1e-12)
    assert "ACC111" in warn["L6"].alarms() and warn["L6"].finding("ACC111").certainty == "certain"
    assert identical(fix["L6"], results[0]["L6", None])
    assert warn["L11"].finding("ACC108").factor == pytest.approx(1 / n)
    assert sorted(warn["two"].alarms()) == ["ACC101", "ACC103"] and gradients(fix["two"]) == pytest.approx(
        whole, rel=1e-12
    )
