"""The split probe tells mean-like, sum-like and coupled losses apart, and leaves no trace."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from accum_plugin.equivalence.probe import ProbeVerdict, open_compiled, split_probe

Loss = Callable[[Tensor, Tensor], Tensor]


def batch(rows: int = 6, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(rows, 5, generator=generator).to(dtype), torch.randint(0, 3, (rows,), generator=generator)


def network(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), *layers, nn.Linear(8, 3))


def probe(model: nn.Module, loss: Loss, data: Any = None, **keywords: Any) -> ProbeVerdict:
    return split_probe(lambda part: loss(model(part[0]), part[1]), data or batch(), modules=[model], **keywords)


def info_nce(features: Tensor, _: Tensor) -> Tensor:
    scores = F.normalize(features) @ F.normalize(features.roll(1, 1)).T / 0.1
    return F.cross_entropy(scores, torch.arange(len(scores)))


class FusedLoss(torch.autograd.Function):
    """A custom function: one opaque node in the graph."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(logits, target)
        return F.cross_entropy(logits, target, reduction="sum")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise AssertionError("the probe must not run backward")


@pytest.mark.parametrize("rows", [2, 5, 6, 16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("loss", "kind", "degree"),
    [
        (F.cross_entropy, "mean", 0),
        (lambda x, y: F.cross_entropy(x, y, reduction="sum"), "sum", 1),
        (FusedLoss.apply, "sum", 1),
        (lambda x, y: F.cross_entropy(x, y, reduction="sum") / 128, "sum", 1),
        (lambda x, y: 0.5 * F.cross_entropy(x, y) + 0.1 * x.square().mean(), "mean", 0),
    ],
)
def test_means_and_sums_of_any_size_and_dtype(
    loss: Loss, kind: str, degree: int, dtype: torch.dtype, rows: int
) -> None:
    verdict = probe(network().to(dtype), loss, batch(rows, dtype))
    assert (verdict.kind, verdict.degree, verdict.examples) == (kind, degree, rows), verdict
    assert verdict.residual <= verdict.tolerance


@pytest.mark.parametrize(
    ("loss", "least"),
    [(info_nce, 0.1), (lambda x, _: x.std(), 0.001), (lambda x, _: x.logsumexp(0).mean(), 0.1)],
)
def test_coupled_losses_are_measured(loss: Loss, least: float) -> None:
    verdict = probe(network(), loss)
    assert verdict.kind == "coupled" and verdict.degree is None
    assert verdict.residual > least > verdict.tolerance
    assert not verdict.batch_statistics


def test_a_rows_duplicate_would_not_tell_a_contrastive_loss_but_halves_do() -> None:
    verdict = probe(network(), info_nce, batch(16))
    assert verdict.kind == "coupled"


def token_mean(x: Tensor, mask: Tensor) -> Tensor:
    return (x.square().mean(-1) * mask).sum() / mask.sum()


def ragged(rows: int) -> tuple[Tensor, Tensor]:
    lengths = torch.arange(1, rows + 1)
    mask = (torch.arange(rows)[None] < lengths[:, None]).float()
    return torch.randn(rows, rows, 5, generator=torch.Generator().manual_seed(rows)) * lengths[:, None, None], mask


@pytest.mark.parametrize("rows", [3, 4, 7, 12])
def test_a_token_mean_over_ragged_examples_is_a_mean(rows: int) -> None:
    verdict = probe(network(), token_mean, ragged(rows))
    assert verdict.kind == "mean", verdict


def test_two_ragged_examples_need_units() -> None:
    assert probe(network(), token_mean, ragged(2)).kind == "unknown"
    told = probe(network(), token_mean, ragged(2), units=lambda part: part[1].sum())
    assert told.kind == "mean" and told.residual <= told.tolerance


def test_batch_norm_is_named_as_what_couples() -> None:
    verdict = probe(network(nn.BatchNorm1d(8), nn.ReLU()), F.cross_entropy)
    assert verdict.kind == "coupled" and verdict.batch_statistics
    assert verdict.residual > 1e-3 > verdict.frozen_residual
    assert "BatchNorm" in verdict.reason


def test_a_contrastive_loss_with_batch_norm_is_coupled_by_itself() -> None:
    verdict = probe(network(nn.BatchNorm1d(8)), info_nce)
    assert verdict.kind == "coupled" and not verdict.batch_statistics
    assert verdict.frozen_residual > 0.1


def test_batch_norm_in_evaluation_mode_couples_nothing() -> None:
    assert probe(network(nn.BatchNorm1d(8)).eval(), F.cross_entropy).kind == "mean"


class FunctionalDropout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.5, self.training)
        x = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.5)[:, 0]
        return torch.dropout(x, 0.5, self.training)


class DropPath(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.new_empty(len(x), 1).bernoulli_(0.5) if self.training else x


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x[:, None])[0][:, 0]


@pytest.mark.parametrize(
    "layer",
    [nn.Dropout(0.5), nn.AlphaDropout(0.5), nn.RReLU(), FunctionalDropout(), DropPath(), Recurrent()]
    + [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)],
    ids=lambda layer: type(layer).__name__,
)
def test_random_layers_lead_to_no_false_alarm(layer: nn.Module) -> None:
    model = (
        network(nn.Unflatten(1, (1, 8)), layer, nn.Flatten())
        if isinstance(layer, nn.TransformerEncoderLayer)
        else network(layer)
    )
    assert probe(model.train(), F.cross_entropy).kind == "mean"


def test_other_randomness_is_said_and_not_judged() -> None:
    verdict = probe(network(), lambda x, _: (x - torch.randn_like(x)).square().mean())
    assert verdict.kind == "unknown" and "random numbers" in verdict.reason


@pytest.mark.parametrize(
    ("loss", "data", "said"),
    [
        (F.cross_entropy, batch(1), "no halves"),
        (lambda x, y: x.mean() * 0, batch(), "zero"),
        (lambda x, y: x.mean() * float("nan"), batch(), "finite"),
        (lambda x, y: x, batch(), "one finite number"),
        (lambda x, y: x @ y, batch(), "could not be run"),
        (F.cross_entropy, (batch()[0], object()), "cannot be cut"),
    ],
)
def test_what_the_probe_cannot_tell_is_unknown(loss: Loss, data: Any, said: str) -> None:
    verdict = probe(network(), loss, data)
    assert verdict.kind == "unknown" and said in verdict.reason, verdict


class Counting(nn.Module):
    """Keeps state in every way a module can: a buffer, an attribute, a list, a lazily made tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.total = torch.zeros(2)
        self.calls = 0
        self.history: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        self.total.add_(1)
        self.calls += 1
        self.history.append(len(x))
        self.lazy = torch.ones(())
        return x


def test_the_probe_leaves_no_trace() -> None:
    model = network(nn.BatchNorm1d(8), nn.Dropout(0.5), Counting())
    model[1](torch.randn(4, 8))
    model[2].eval()
    model[0].bias.requires_grad_(False)
    model(batch()[0]).sum().backward()
    numpy.random.seed(0)
    del model[3].lazy
    grads = [(p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    before = _observe(model)
    inputs = batch()

    def loss(part: tuple[Tensor, Tensor]) -> Tensor:
        random.random(), numpy.random.rand()
        part[0].mul_(2.0)
        return F.cross_entropy(model(part[0]), part[1])

    verdict = split_probe(loss, inputs, modules=[model])
    assert verdict.kind == "coupled" and verdict.batch_statistics
    assert _observe(model) == before
    assert torch.equal(inputs[0], batch()[0])
    for parameter, (grad, values) in zip(model.parameters(), grads):
        assert parameter.grad is grad and (grad is None or torch.equal(grad, values))


def _observe(model: nn.Module) -> Any:
    counting = model[3]
    return (
        random.getstate(),
        numpy.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
        [module.training for module in model.modules()],
        {name: buffer.tolist() for name, buffer in model.named_buffers()},
        [parameter.requires_grad for parameter in model.parameters()],
        (counting.total.tolist(), counting.calls, list(counting.history), hasattr(counting, "lazy")),
        torch.is_grad_enabled(),
    )


def test_a_compiled_loss_is_opened_for_one_microbatch() -> None:
    model = network()
    compiled = torch.compile(lambda part: F.cross_entropy(model(part[0]), part[1]), backend="aot_eager")
    with open_compiled():
        assert type(compiled(batch()).grad_fn).__name__ == "NllLossBackward0"
    assert "Compiled" in type(compiled(batch()).grad_fn).__name__
    assert split_probe(compiled, batch(), modules=[model]).kind == "mean"


def test_a_compiled_module_is_probed() -> None:
    model = network(nn.BatchNorm1d(8))
    model.compile(backend="aot_eager")
    verdict = probe(model, F.cross_entropy)
    assert verdict.kind == "coupled" and verdict.batch_statistics


def _gathered_contrast(rank: int, n: int) -> ProbeVerdict:
    """A loss that gathers, probed with a batch of another size on each rank (one of them too small)."""
    model = network()

    def loss(part: Tensor) -> Tensor:
        features = model(part)
        gathered = [torch.zeros_like(features) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, features)
        return info_nce(torch.cat(gathered), features)

    verdict = split_probe(loss, batch(rank * 3 + 1)[0], modules=[model])
    dist.barrier()
    assert dist.get_world_size() == n
    return verdict


def test_ranks_do_not_wait_for_each_other(ranks: Callable[..., list[ProbeVerdict]]) -> None:
    verdicts = ranks(3, _gathered_contrast)
    assert [verdict.kind for verdict in verdicts] == ["unknown", "coupled", "coupled"], verdicts
