"""Losses that the graph does not show, in real loops: compiled, in a custom function, in the model's own forward."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate_loops
import lightning_loops
import pytest
import torch
from accelerate_loops import Loop, sequences, token_mean
from lightning_loops import alone, examples, identical
from torch import Tensor, nn
from torch.nn import functional as F

K = 3
BATCHES = list(zip(*(part.split(5) for part in examples(2 * K * 5))))
HALVES = [range(start, start + 5 * K) for start in (0, 5 * K)]


@pytest.fixture(autouse=True)
def _quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    accelerate_loops.fresh()
    torch._dynamo.reset()
    with accelerate_loops.quiet():
        yield


class FusedMean(torch.autograd.Function):
    """A cross-entropy in one node, as kernels are that never write the logits' gradient out."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(logits, labels)
        return F.cross_entropy(logits, labels)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, labels = ctx.saved_tensors
        hit = F.one_hot(labels, logits.shape[1])
        return grad * (logits.softmax(1) - hit) / len(labels), None


def compiled_loss() -> Callable[[Tensor, Tensor], Tensor]:
    return torch.compile(lambda logits, labels: F.cross_entropy(logits, labels), backend="aot_eager")


def meant(model: nn.Module, data: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Gradient of each window as one batch, from the same weights."""
    gradients = []
    for half in HALVES:
        model.zero_grad()
        F.cross_entropy(model(data[0][list(half)]), data[1][list(half)]).backward()
        gradients.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
    return gradients


def close(seen: list[Any], want: list[Tensor]) -> bool:
    pairs = [(torch.as_tensor(a, dtype=b.dtype), b) for a, b in zip(seen, want, strict=True)]
    return all(torch.allclose(a, b, rtol=1e-11, atol=1e-14) for a, b in pairs)


# -- Lightning: the training step is run once more ------------------------------------------------------------------


def stepping(loss_fn: Callable[[Tensor, Tensor], Tensor], divisor: int = 1) -> Callable[..., Tensor]:
    return lambda loop, batch, index: loss_fn(loop.model(batch[0]), batch[1]) / divisor


def still(loop: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(loop.parameters(), lr=0.0)


LOSSES = {"compiled": compiled_loss, "custom function": lambda: FusedMean.apply}


@pytest.mark.parametrize("kind", LOSSES)
def test_lightning(kind: str) -> None:
    job = {"batches": BATCHES, "model": lightning_loops.network, "K": K, "optimizers": still}
    right, wrong = stepping(LOSSES[kind]()), stepping(LOSSES[kind](), K)
    bare, silent, fixed = (
        alone(step=step, mode=mode, **job) for step, mode in ((right, None), (right, "fix"), (wrong, "fix"))
    )
    assert identical(silent, bare) and silent.findings == []
    assert [(f.code, f.factor, f.action) for f in fixed.findings] == [("ACC103", pytest.approx(1 / K), "corrected")]
    assert close(fixed.grads, meant(lightning_loops.network(), examples(2 * K * 5)))
    assert [w.gradient_scale for w in fixed.windows] == pytest.approx([1 / K] * 2)


def contrastive(loss_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def step(loop: Any, batch: Any, index: int) -> Tensor:
        embedded = loop.model(batch[0])
        return loss_fn(embedded @ embedded.t(), torch.arange(len(embedded)).flip(0))

    return step


def normalized() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(6, dtype=torch.float64), lightning_loops.network())


DROPPED = nn.Dropout(0.5)
COUPLED: dict[str, tuple[Callable[..., Tensor], Callable[[], nn.Module], str, str]] = {
    "in one node": (contrastive(FusedMean.apply), lightning_loops.network, "ACC302", "probe"),
    "in the graph": (contrastive(F.cross_entropy), lightning_loops.network, "ACC302", "graph"),
    "by a layer": (stepping(F.cross_entropy), normalized, "ACC301", "configuration"),
}


@pytest.mark.parametrize("kind", COUPLED)
def test_lightning_coupled(kind: str) -> None:
    step, model, code, evidence = COUPLED[kind]
    job = {"step": step, "batches": BATCHES, "model": model, "K": K}
    bare, run = (alone(mode=mode, **job) for mode in (None, "fix"))
    assert identical(run, bare)
    (finding,) = run.findings
    assert (finding.code, finding.certainty, finding.evidence) == (code, "info", evidence)
    measured = re.search(r"halves differ by (\S+) of the loss", finding.message)
    assert measured and 0.001 < float(measured[1]) < 1.0
    silenced = alone(mode="fix", keywords={"ignore": (code,)}, **job)
    assert identical(silenced, bare) and silenced.findings == []


def test_dropout_is_no_coupling() -> None:
    def step(loop: Any, batch: Any, index: int) -> Tensor:
        return FusedMean.apply(loop.model(DROPPED(batch[0])), batch[1])

    job = {"step": step, "batches": BATCHES, "model": lightning_loops.network, "K": K}
    bare, run = (alone(mode=mode, **job) for mode in (None, "fix"))
    assert identical(run, bare) and run.findings == []


# -- Accelerate: a loop's loss cannot be run again ------------------------------------------------------------------


def by_hand(loss_fn: Callable[..., Tensor], divisor: int = 1) -> Callable[[Loop], None]:
    def loop(loop: Loop) -> None:
        for features, labels in loop.loader:
            with loop.accelerator.accumulate(loop.model):
                loop.accelerator.backward(loss_fn(loop.model(features), labels) / divisor)
                loop.optimizer.step()
                loop.optimizer.zero_grad()

    return loop


def data() -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(*examples(2 * K * 5))


JOB = {"steps": K, "batch": 5, "model": lightning_loops.network}


def first(gradients: list[Tensor]) -> list[Tensor]:
    """The first parameter's part of flat gradients."""
    return [gradient[: 6 * 8] for gradient in gradients]


def test_a_compiled_loss_runs_eagerly_once() -> None:
    calls: list[bool] = []
    compiled = compiled_loss()

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        loss = compiled(logits, labels)
        calls.append("Compiled" not in type(loss.grad_fn).__name__)
        return loss

    bare, silent, fixed = (
        accelerate_loops.train(by_hand(loss_fn, divisor), mode=mode, data=data(), **JOB)
        for mode, divisor in ((None, 1), ("fix", 1), ("fix", K))
    )
    assert silent.gradients == bare.gradients and silent.findings == []
    one_run = 2 * K
    assert calls[:one_run] == [False] * one_run
    assert calls[one_run : 2 * one_run] == calls[2 * one_run :] == [False, True] + [False] * (one_run - 2)
    assert fixed.seen == {"ACC103": pytest.approx(1 / K)}
    want = first(meant(lightning_loops.network(), examples(2 * K * 5)))
    assert close(fixed.gradients[1:], want[1:])  # nothing is known in the first window when its gradient is complete
    assert close([[K * g for g in fixed.gradients[0]]], want[:1])


def test_a_compiled_token_mean_is_silent() -> None:
    compiled = torch.compile(token_mean, backend="aot_eager")
    job = {"steps": K, "batch": 2, "model": accelerate_loops.network, "data": sequences(12)}
    bare, watched = (accelerate_loops.train(by_hand(compiled), mode=mode, **job) for mode in (None, "fix"))
    assert watched.alarms == [] and watched.gradients == bare.gradients
    (finding,) = watched.findings
    assert finding.code == "ACC901" and "units=" in finding.message


def test_a_custom_function_is_said_to_be_unreadable_or_declared() -> None:
    silent = accelerate_loops.train(by_hand(FusedMean.apply), data=data(), **JOB)
    assert [f.code for f in silent.findings] == ["ACC901"]
    wrong = by_hand(FusedMean.apply, K)
    declared = {"units": lambda batch: len(batch[1]), "normalization": "mean"}
    fixed = accelerate_loops.train(wrong, data=data(), **declared, **JOB)
    assert close(fixed.gradients, first(meant(lightning_loops.network(), examples(2 * K * 5))))


class Head(nn.Module):
    """A model that computes its own loss, as transformers' do."""

    def __init__(self, loss_fn: Callable[..., Tensor], divisor: int = 1) -> None:
        super().__init__()
        self.body = lightning_loops.network()
        self.loss_fn, self.divisor = loss_fn, divisor

    def forward(self, features: Tensor, labels: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=self.loss_fn(self.body(features), labels) / self.divisor)


def with_model_loss(divisor: int) -> Callable[[Loop], None]:
    def loop(loop: Loop) -> None:
        for features, labels in loop.loader:
            with loop.accelerator.accumulate(loop.model):
                loop.accelerator.backward(loop.model(features, labels).loss / divisor)
                loop.optimizer.step()
                loop.optimizer.zero_grad()

    return loop


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize(("inside", "outside", "factor"), [(1, 1, 1), (K, 1, K), (1, K, K), (K, K, K * K)])
def test_a_loss_in_the_models_forward(kind: str, inside: int, outside: int, factor: int) -> None:
    job = {**JOB, "model": lambda: Head(LOSSES[kind](), inside), "data": data()}
    result = accelerate_loops.train(with_model_loss(outside), **job)
    assert close(result.gradients, first(meant(lightning_loops.network(), examples(2 * K * 5))))
    assert result.seen == ({} if factor == 1 else {"ACC103": pytest.approx(1 / factor)})
