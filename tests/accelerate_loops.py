"""Small hand-written Accelerate loops for the tests: one scalar weight, or a tiny network, step by step.

With the scalar weight the loss of example ``x`` is ``w * x``: the gradient *is* the weighted mean of the ``x``, so a
factor can be read off. Everything here can be sent to a rank of the pool.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import GradientAccumulationPlugin
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from accum_plugin import Finding, WindowRecord
from accum_plugin.accelerate import AccumulationHook


class Scalar(nn.Module):
    """One weight: the loss of each example is ``w * x``."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def counting(num: int) -> TensorDataset:
    """Examples 1 to ``num``."""
    return TensorDataset(torch.arange(1.0, num + 1, dtype=torch.float64))


def network() -> nn.Module:
    """A classifier of 4 classes for every token of 6 features, the same on every call."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def sequences(num: int, length: int = 7) -> TensorDataset:
    """``num`` sequences of 1 to ``length`` tokens, the same on every call; labels are -100 behind their ends."""
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randn(num, length, 6, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 4, (num, length), generator=generator)
    lengths = torch.randint(1, length + 1, (num, 1), generator=generator)
    return TensorDataset(tokens, labels.masked_fill(torch.arange(length) >= lengths, -100))


def token_mean(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy over the tokens that are there."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def full_batch(data: TensorDataset, windows: Sequence[range]) -> list[list[float]]:
    """Gradient of :func:`token_mean` over each window's sequences as one batch on one process, first parameter."""
    gradients = []
    for window in windows:
        model = network()
        tokens, labels = data[list(window)]
        token_mean(model(tokens), labels).backward()
        gradients.append(model[0].weight.grad.flatten().tolist())
    return gradients


def windows_of(num: int, size: int) -> list[range]:
    """The examples of each window of ``size`` examples over all ranks; the last may hold fewer."""
    return [range(start, min(start + size, num)) for start in range(0, num, size)]


def means(num: int, size: int) -> list[float]:
    """What the scalar gradient of each window should be: the mean of its examples, counted from 1."""
    return [sum(window) / len(window) + 1 for window in windows_of(num, size)]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Swallow warnings and what is printed."""
    nowhere = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stderr(nowhere), contextlib.redirect_stdout(nowhere):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def quick_collections() -> Iterator[None]:
    """Set aside what lives already: ``free_memory()`` collects garbage each time, through half a million objects."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclasses.dataclass
class Loop:
    """What a loop works with.

    Args:
        accelerator: The Accelerator.
        model: As prepared.
        optimizer: As prepared.
        loader: As prepared.
        scheduler: As prepared.
        steps: ``K``.
        ranks: ``n``.
    """

    accelerator: Accelerator
    model: Any
    optimizer: Any
    loader: Any
    scheduler: Any
    steps: int

    @property
    def ranks(self) -> int:
        return self.accelerator.num_processes


@dataclasses.dataclass
class Result:
    """What came out of a run on one rank.

    Args:
        gradients: The first parameter's gradient at every optimizer step, flattened.
        findings: The hook's, or none without a hook.
        windows: The hook's records.
        returned: What the loop returned.
    """

    gradients: list[list[float]]
    findings: list[Finding]
    windows: list[WindowRecord]
    returned: Any = None

    @property
    def scalars(self) -> list[float]:
        return [gradient[0] for gradient in self.gradients]

    @property
    def alarms(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.certainty != "info"]

    @property
    def seen(self) -> dict[str, float | None]:
        """Factor by code, of everything that is an alarm."""
        return {finding.code: finding.factor for finding in self.alarms}


def fresh() -> None:
    """Forget the Accelerators of earlier runs, not the process group."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def train(
    loop: Callable[[Loop], Any],
    *,
    mode: str | None = "fix",
    steps: int = 4,
    batch: int = 2,
    num: int = 16,
    when: str = "before",
    model: Callable[[], nn.Module] = Scalar,
    data: Any = None,
    collate: Callable[[Any], Any] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    lr: float = 0.0,
    plugin: dict[str, Any] | None = None,
    accelerator: dict[str, Any] | None = None,
    scheduler: Callable[..., Any] | None = None,
    **keywords: Any,
) -> Result:
    """Run a loop from a fresh state, with a hook or without.

    Args:
        loop: ``loop(Loop)``, the user's training loop.
        mode: The hook's mode; ``None`` leaves it out.
        steps: ``K`` as the Accelerator has it, and as the loop knows it.
        batch: Examples in a microbatch.
        num: Examples in the data set, where ``data`` is not given.
        when: Whether the hook is attached ``"before"`` or ``"after"`` ``prepare()``.
        model: Makes the model.
        data: Data set; :func:`counting` if left out.
        collate: The loader's ``collate_fn``.
        optimizer: Makes the optimizer.
        lr: Learning rate.
        plugin: More keywords of the ``GradientAccumulationPlugin``.
        accelerator: More keywords of the Accelerator.
        scheduler: Makes a scheduler, to be prepared.
        keywords: More keywords of the hook.
    """
    fresh()
    accumulation = GradientAccumulationPlugin(num_steps=steps, **(plugin or {}))
    made = Accelerator(cpu=True, gradient_accumulation_plugin=accumulation, **(accelerator or {}))
    with quiet():
        hook = AccumulationHook.attach(made, mode, **keywords) if mode and when == "before" else None
        net = model()
        opt = optimizer(net.parameters(), lr=lr)
        schedule = scheduler(opt) if scheduler else None
        loader = DataLoader(counting(num) if data is None else data, batch_size=batch, collate_fn=collate)
        prepared = Loop(made, *made.prepare(net, opt, loader, schedule), steps)
        hook = AccumulationHook.attach(made, mode, **keywords) if mode and when == "after" else hook
        gradients: list[list[float]] = []

        def look(opt: torch.optim.Optimizer, *_: Any) -> None:
            gradient = opt.param_groups[0]["params"][0].grad
            if gradient is not None:  # a closure has yet to compute it
                gradients.append(gradient.flatten().tolist())

        handle = opt.register_step_pre_hook(look)
        returned = loop(prepared)
        made.free_memory()  # end_training() would take the pool's process group down
        handle.remove()
    result = Result(gradients, list(hook.findings) if hook else [], list(hook.windows) if hook else [], returned)
    if hook is not None:
        hook.detach()
    return result


def ranked(rank: int, n: int, runs: Sequence[tuple[Callable[[Loop], Any], dict[str, Any]]]) -> list[Result]:
    """Run several loops on a rank of the pool, one after another."""
    with quick_collections():
        return [train(loop, **keywords) for loop, keywords in runs]
