"""One window of a real run against the same examples as one batch on one process, on real gloo ranks.

Ranks, accumulation steps and local batch are distinct (2 or 3, 3, 5), or two mistakes look alike.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from accum_plugin import check_equivalence
from accum_plugin.equivalence import EquivalenceProbe
from accum_plugin.equivalence.comparison import EquivalenceReport, name_factor

K = 3
LOCAL = 5
Ranks = Callable[..., list[Any]]


def network(*layers: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *layers, nn.Linear(8, 3)).to(dtype)


def microbatches(rank: int, count: int = K, sizes: int = LOCAL, dtype: torch.dtype = torch.float64) -> list[Any]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [
        (torch.randn(sizes, 6, generator=generator).to(dtype), torch.randint(0, 3, (sizes,), generator=generator))
        for _ in range(count)
    ]


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def divided_by(number: float) -> Callable[[Tensor], None]:
    return lambda loss: (loss / number).backward()


def _ddp(
    rank: int, n: int, *layers: nn.Module, divide: float = K, count: int = K, dtype: Any = torch.float64, **options: Any
) -> EquivalenceReport:
    """A right run unless told otherwise: local means, divided by the accumulation steps, averaged by DDP."""
    model = DistributedDataParallel(network(*layers, dtype=dtype))
    data = microbatches(rank, count, dtype=dtype)
    loss = options.pop("loss_fn", mean_loss)
    return check_equivalence(model, data, loss, backward=divided_by(divide), accumulation_steps=K, **options)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_right_run_is_equivalent_and_every_rank_says_the_same(ranks: Ranks, n: int) -> None:
    reports = ranks(n, _ddp)
    assert all(report == reports[0] for report in reports)
    report = reports[0]
    assert report.equivalent is True, report
    assert (report.examples, report.ranks, report.microbatches) == (n * K * LOCAL, n, K)
    assert report.factor == pytest.approx(1.0, abs=1e-12) and report.cosine == pytest.approx(1.0, abs=1e-12)
    assert report.deviation < report.tolerance < 1e-12
    assert str(report).startswith("Equivalent") and report.tolerance_source == "measured by perturbation"


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 0.2)], ids=str
)
def test_the_tolerance_follows_the_dtype(ranks: Ranks, dtype: torch.dtype, tolerance: float) -> None:
    report = ranks(2, _ddp, dtype=dtype)[0]
    assert report.equivalent is True, report
    assert 1e-16 < report.tolerance < tolerance
    assert ranks(2, _ddp, dtype=dtype, divide=1)[0].factor_name == "K"


@pytest.mark.parametrize(
    ("n", "options", "factor", "name"),
    [
        (2, {"divide": 1}, 3.0, "K"),
        (2, {"divide": 7 * K}, 1 / 7, ""),
        (2, {"divide": K * K}, 1 / 3, "1/K"),
        (2, {"divide": K / 2}, 2.0, "n"),
        (2, {"divide": K * 2}, 0.5, "1/n"),
        (2, {"divide": 0.5}, 6.0, "n*K"),
        (2, {"count": 2}, 2 / 3, "m/K"),
        (2, {"count": 2, "divide": 1}, 2.0, "n or m"),
    ],
)
def test_a_factor_is_named(ranks: Ranks, n: int, options: dict[str, Any], factor: float, name: str) -> None:
    report = ranks(n, _ddp, **options)[0]
    assert report.equivalent is False
    assert report.factor == pytest.approx(factor) and report.factor_name == name, report
    assert report.cosine == pytest.approx(1.0) and not report.coupled
    assert (f"= {name}," in str(report)) == bool(name)


def _global_mean(model: nn.Module, batch: Any, *, size: int) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum") / size


def test_the_global_batch_then_averaged_is_one_over_n(ranks: Ranks) -> None:
    loss = functools.partial(_global_mean, size=2 * K * LOCAL)
    report = ranks(2, _ddp, loss_fn=loss, divide=1)[0]
    assert report.factor == pytest.approx(1 / 2) and report.factor_name == "1/n"


def _counting_loss(model: nn.Module, batch: Any) -> Tensor:
    """Divide by the examples of all ranks, times the ranks that DDP divides by: right, and full of collectives."""
    count = torch.tensor(float(len(batch[0])), dtype=torch.float64)
    dist.all_reduce(count)
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum") * dist.get_world_size() / count


def test_a_loss_that_asks_the_ranks_runs_alone_as_on_one_process(ranks: Ranks) -> None:
    report = ranks(3, _ddp, loss_fn=_counting_loss)[0]
    assert report.equivalent is True, report


def test_a_reference_of_the_users_own(ranks: Ranks) -> None:
    report = ranks(2, _ddp, loss_fn=lambda model, batch: 2 * mean_loss(model, batch), reference=mean_loss)[0]
    assert report.factor_name == "n", report


# ------------------------------------------------------------------ gradients that the real run has already


def _given(rank: int, n: int, *, wrong: float = 1.0, layers: tuple[nn.Module, ...] = (), **options: Any) -> Any:
    """Gradients accumulated by hand and all-reduced, handed over as they stand in ``.grad``."""
    model = network(*layers)
    data = microbatches(rank)
    probe = EquivalenceProbe(accumulation_steps=K)
    for batch in data:
        probe.record(batch)
        (mean_loss(model, batch) / K * wrong).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= n
    kept = [parameter.grad.clone() for parameter in model.parameters()]
    report = probe.check(model, mean_loss, [parameter.grad for parameter in model.parameters()], **options)
    unchanged = all(torch.equal(parameter.grad, grad) for parameter, grad in zip(model.parameters(), kept))
    return report, unchanged, len(probe.microbatches)


def test_measured_gradients_are_compared_and_left_alone(ranks: Ranks) -> None:
    for report, unchanged, left in ranks(2, _given):
        assert report.equivalent is True, report
        assert unchanged and left == 0
    assert ranks(2, _given, wrong=0.5)[0][0].factor_name == "1/n"


def test_measured_gradients_with_dropout_are_judged_by_the_spread_of_draws(ranks: Ranks) -> None:
    right = ranks(2, _given, layers=(nn.Dropout(0.1),))[0][0]
    assert right.equivalent is not False, right
    assert "draws" in right.tolerance_source and right.tolerance > 1e-3
    wrong = ranks(2, _given, layers=(nn.Dropout(0.1),), wrong=8.0)[0][0]
    assert wrong.equivalent is False and wrong.factor == pytest.approx(8.0, rel=0.2)


def test_measured_gradients_of_random_layers_need_the_real_code_for_an_exact_answer(ranks: Ranks) -> None:
    report = ranks(2, _given, layers=(nn.Dropout(0.3),), step=_manual_step)[0][0]
    assert report.equivalent is True and report.tolerance < 1e-11, report


def _manual_step(model: nn.Module, data: list[Any]) -> None:
    for batch in data:
        (mean_loss(model, batch) / len(data)).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def _diverged(rank: int, n: int) -> EquivalenceReport:
    """Nobody combines the ranks' gradients."""
    return check_equivalence(network(), microbatches(rank), mean_loss, backward=divided_by(K))


def test_ranks_that_were_never_synchronized(ranks: Ranks) -> None:
    reports = ranks(3, _diverged)
    assert reports[0] == reports[2] and reports[0].equivalent is False
    assert reports[0].reason == "the ranks hold different gradients"


# ------------------------------------------------------------------ ragged microbatches


def _sequences(rank: int, padded_to: int | None) -> list[Any]:
    generator = torch.Generator().manual_seed(rank)
    batches = []
    for index in range(K):
        length = 2 + 3 * index + rank
        width = padded_to or length
        mask = (torch.arange(width) < length).double().expand(LOCAL, -1)
        batches.append({"x": torch.randn(LOCAL, width, 6, generator=generator).double(), "mask": mask})
    return batches


def token_mean(model: nn.Module, batch: Any) -> Tensor:
    per_token = model(batch["x"]).square().mean(-1)
    return (per_token * batch["mask"]).sum() / batch["mask"].sum()


def _ragged(rank: int, n: int, padded_to: int | None, **options: Any) -> EquivalenceReport:
    model = DistributedDataParallel(network())
    data = _sequences(rank, padded_to)
    return check_equivalence(model, data, token_mean, backward=divided_by(K), **options)


def test_a_mean_of_means_is_no_factor_and_its_spread_is_measured(ranks: Ranks) -> None:
    report = ranks(2, _ragged, 9)[0]
    assert report.equivalent is False and report.factor_name == "" and report.cosine < 1 - 1e-6
    lengths = [2 + 3 * index + rank for rank in range(2) for index in range(K)]
    assert report.weight_spread == pytest.approx(max(lengths) / min(lengths), rel=1e-6)
    assert not report.coupled and "weigh differently" in report.reason


def _count(batch: Any) -> Tensor:
    return batch["mask"].sum()


def test_sequences_of_different_lengths_need_units(ranks: Ranks) -> None:
    refused = ranks(2, _ragged, None)[0]
    assert refused.equivalent is None and "give units=" in refused.reason
    told = ranks(2, _ragged, None, units=_count)[0]
    assert told.equivalent is False and told.weight_spread == pytest.approx(9 / 2)
    assert "could not be joined" in told.reason


def _right_tokens(rank: int, n: int) -> EquivalenceReport:
    """Every token weighs the same: the token counts of the window are summed over ranks first."""

    def step(model: nn.Module, data: list[Any]) -> None:
        total = sum(batch["mask"].sum() for batch in data)
        dist.all_reduce(total)
        for batch in data:
            (token_mean(model, batch) * batch["mask"].sum() * n / total).backward()

    model = DistributedDataParallel(network())
    return check_equivalence(model, _sequences(rank, None), token_mean, step=step, units=_count)


def test_a_loop_that_weighs_tokens_right_is_equivalent(ranks: Ranks) -> None:
    report = ranks(2, _right_tokens)[0]
    assert report.equivalent is True, report


def _join_padded(batches: list[Any]) -> Any:
    width = max(batch["x"].size(1) for batch in batches)
    pads = [(batch, width - batch["x"].size(1)) for batch in batches]
    return {
        "x": torch.cat([F.pad(batch["x"], (0, 0, 0, pad)) for batch, pad in pads]),
        "mask": torch.cat([F.pad(batch["mask"], (0, pad)) for batch, pad in pads]),
    }


def test_the_user_can_join_what_the_plugin_cannot(ranks: Ranks) -> None:
    report = ranks(2, _ragged, None, join=_join_padded)[0]
    assert report.weight_spread == pytest.approx(9 / 2) and "could not be joined" not in report.reason


# ------------------------------------------------------------------ random layers, coupling, batch statistics


def test_dropout_gives_no_false_alarm_and_hides_no_factor(ranks: Ranks) -> None:
    right = ranks(2, _ddp, nn.Dropout(0.5))[0]
    assert right.equivalent is True and right.tolerance < 1e-12, right
    assert ranks(2, _ddp, nn.Dropout(0.5), divide=1)[0].factor_name == "K"


def _noisy_loss(model: nn.Module, batch: Any) -> Tensor:
    return mean_loss(model, (batch[0] + 0.05 * torch.randn_like(batch[0]), batch[1]))


def test_a_loss_that_draws_noise_gives_no_false_alarm(ranks: Ranks) -> None:
    right = ranks(2, _ddp, loss_fn=_noisy_loss)[0]
    assert right.equivalent is not False and "draws" in right.tolerance_source, right
    assert ranks(2, _ddp, loss_fn=_noisy_loss, divide=1 / 4)[0].equivalent is False


def test_batch_norm_is_reported_as_the_reason(ranks: Ranks) -> None:
    report = ranks(2, _ddp, nn.BatchNorm1d(8))[0]
    assert report.equivalent is False and report.coupled and report.batch_statistics
    assert "BatchNorm" in report.reason


def _frozen_norm(rank: int, n: int) -> EquivalenceReport:
    model = DistributedDataParallel(network(nn.BatchNorm1d(8)).eval())
    return check_equivalence(model, microbatches(rank), mean_loss, backward=divided_by(K))


def test_batch_norm_in_evaluation_mode_is_equivalent(ranks: Ranks) -> None:
    assert ranks(2, _frozen_norm)[0].equivalent is True


def _contrast(model: nn.Module, batch: Any) -> Tensor:
    features = F.normalize(model(batch[0]))
    scores = features @ F.normalize(model(batch[0].flip(1))).T / 0.1
    return F.cross_entropy(scores, torch.arange(len(scores)))


def test_a_contrastive_loss_is_coupled(ranks: Ranks) -> None:
    report = ranks(2, _ddp, loss_fn=_contrast)[0]
    assert report.equivalent is False and report.coupled and not report.batch_statistics
    assert "compares the examples" in report.reason


# ------------------------------------------------------------------ one process: engines, traces, limits


class Tied(nn.Module):
    """Tied, frozen and unused weights, recurrent dropout, reentrant checkpointing, state in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6)
        self.again.weight = self.encode.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(6, 6)
        self.recurrent = nn.LSTM(6, 6, num_layers=2, dropout=0.5, batch_first=True)
        self.norm = nn.BatchNorm1d(6).eval()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = checkpoint(self.encode, x.requires_grad_(), use_reentrant=True)
        x = self.recurrent(self.norm(self.frozen(x))[:, None])[0][:, 0]
        return F.dropout(self.again(x), 0.2, self.training)


def _tied() -> Tied:
    torch.manual_seed(0)
    return Tied().double()


def test_tied_frozen_unused_recurrent_and_checkpointed_parts() -> None:
    report = check_equivalence(_tied(), microbatches(0), mean_loss, backward=divided_by(K))
    assert report.equivalent is True and report.tolerance < 1e-10, report


def _observed(model: nn.Module) -> Any:
    return (
        torch.get_rng_state().tolist(),
        [module.training for module in model.modules()],
        [(name, value.tolist()) for name, value in model.state_dict().items()],
        [(id(p), id(p.grad), p.requires_grad, None if p.grad is None else p.grad.tolist()) for p in model.parameters()],
        model.calls,
        torch.is_grad_enabled(),
    )


@contextlib.contextmanager
def counted_hooks(model: nn.Module) -> Iterator[list[Any]]:
    calls: list[Any] = []
    handles = [p.register_hook(lambda grad: calls.append(1)) for p in model.parameters() if p.requires_grad]
    yield calls
    for handle in handles:
        handle.remove()


def test_no_trace_is_left_and_no_hook_of_a_parameter_fires() -> None:
    model = _tied()
    model.norm.train()
    mean_loss(model, microbatches(0)[0]).backward()
    data = microbatches(0)
    before = _observed(model)
    grads = [parameter.grad for parameter in model.parameters()]
    with counted_hooks(model) as calls:
        report = check_equivalence(model, data, mean_loss, gradients=grads)
    assert report.equivalent is None and "random layers" in report.reason and not calls
    assert _observed(model) == before
    check_equivalence(model, data, mean_loss)
    assert _observed(model) == before
    assert all(torch.equal(a[0], b[0]) for a, b in zip(data, microbatches(0)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_seen_and_tolerated(dtype: torch.dtype) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return mean_loss(model, batch)

    model, data = network(dtype=torch.float32), microbatches(0, dtype=torch.float32)
    report = check_equivalence(model, data, loss, backward=divided_by(K))
    assert report.equivalent is True and 1e-4 < report.tolerance < 0.2, report
    assert check_equivalence(model, data, loss).factor_name == "K"


def test_a_compiled_model_is_checked_eagerly() -> None:
    model = network()
    compiled = torch.compile(model, backend="aot_eager")
    data = microbatches(0)
    report = check_equivalence(compiled, data, mean_loss, backward=divided_by(K))
    assert report.equivalent is True, report


def test_sparse_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 1)).double()
    data = [torch.arange(index, index + LOCAL) % 20 for index in range(K)]
    report = check_equivalence(model, data, lambda m, x: m(x).square().mean(), backward=divided_by(K))
    assert report.equivalent is True, report


def test_a_subset_keeps_the_factor() -> None:
    data = microbatches(0, sizes=8)
    report = check_equivalence(network(), data, mean_loss, max_examples=10)
    assert report.factor_name == "K" and report.examples == 9
    refused = check_equivalence(network(), data, mean_loss, gradients=[None] * 4, max_examples=10)
    assert refused.equivalent is None and "step=" in refused.reason


def test_missing_and_stale_gradients() -> None:
    model, data = network(), microbatches(0, count=1)
    mean_loss(model, data[0]).backward()
    grads = [parameter.grad for parameter in model.parameters()]
    report = check_equivalence(model, data, mean_loss, gradients=[None, *grads[1:]])
    assert report.equivalent is False and report.worst_parameter == "0.weight"
    assert report.worst_deviation == pytest.approx(1.0) and report.factor_name == ""


def test_the_users_tolerance_counts() -> None:
    model, data = network(), microbatches(0, count=1)
    mean_loss(model, data[0]).backward()
    grads = [1.001 * parameter.grad for parameter in model.parameters()]
    assert check_equivalence(model, data, mean_loss, gradients=grads).equivalent is False
    assert check_equivalence(model, data, mean_loss, gradients=grads, tolerance=0.01).equivalent is True


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"loss_fn": lambda m, b: m(b[0])}, "not one number"),
        ({"loss_fn": lambda m, b: m(b[0]).mean() * math.nan}, "nan"),
        ({"loss_fn": lambda m, b: None}, "not one number"),
        ({"loss_fn": lambda m, b: b[9]}, "IndexError"),
        ({"gradients": [None]}, "1 gradients for 4 parameters"),
        ({"gradients": [torch.full((8, 6), math.inf), None, None, None]}, "not finite"),
        ({"microbatches": []}, "no examples"),
        ({"microbatches": [torch.ones(2, 3), torch.ones(2, 4)]}, "give units="),
    ],
)
def test_what_keeps_the_check_from_running_is_said(options: dict[str, Any], said: str) -> None:
    arguments = {"microbatches": microbatches(0), "loss_fn": mean_loss, **options}
    report = check_equivalence(network(), **arguments)
    assert report.equivalent is None and said in report.reason, report
    assert json.loads(json.dumps(report.to_dict()))["factor"] is None
    assert report.reason in str(report)


def _one_rank_fails(rank: int, n: int) -> EquivalenceReport:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        if rank == 1:
            raise OSError("disk full")
        return mean_loss(model, batch)

    report = check_equivalence(network(), microbatches(rank), loss)
    dist.barrier()
    return report


def test_a_rank_that_fails_keeps_no_other_waiting(ranks: Ranks) -> None:
    for report in ranks(3, _one_rank_fails):
        assert report.equivalent is None and "rank 1 failed with OSError('disk full')" in report.reason


def _empty_rank(rank: int, n: int, wrapped: bool) -> EquivalenceReport:
    model = DistributedDataParallel(network()) if wrapped else network()
    return check_equivalence(model, microbatches(rank)[: 2 * (rank == 0)], mean_loss, step=_weighed_step)


def _weighed_step(model: nn.Module, data: list[Any]) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for batch in data:
        (mean_loss(model, batch) / 2).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def test_a_rank_without_a_microbatch(ranks: Ranks) -> None:
    assert ranks(2, _empty_rank, False)[1].equivalent is True
    wrapped = ranks(2, _empty_rank, True)[0]
    assert wrapped.equivalent is None and "rank 1 has no microbatch" in wrapped.reason


def _sharded(rank: int, n: int) -> EquivalenceReport:
    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (n,)))
    return check_equivalence(model, microbatches(rank), mean_loss)


def test_sharded_parameters_are_refused_on_every_rank(ranks: Ranks) -> None:
    for report in ranks(2, _sharded):
        assert report.equivalent is None and "sharded" in report.reason


def test_names_of_factors() -> None:
    name = functools.partial(name_factor, tolerance=1e-6)
    assert name(0.25, ranks=2, steps=4, microbatches=4) == "1/K"
    assert name(4.0, ranks=4, steps=4, microbatches=4) == "n or K"
    assert name(0.75, ranks=2, steps=4, microbatches=3) == "m/K"
    assert name(0.375, ranks=2, steps=4, microbatches=3) == "m/(n*K)"
    assert name(1.5, ranks=1, steps=1, microbatches=1) == ""


def test_gradients_that_are_zero_on_both_sides_are_equivalent() -> None:
    report = check_equivalence(network(), microbatches(0), lambda m, b: m(b[0]).sum() * 0.0)
    assert report.equivalent is True and report.factor == 1.0
