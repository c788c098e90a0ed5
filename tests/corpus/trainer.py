"""Stock and overridden transformers Trainers (rows T1 to T3 and silent rows)."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from accelerate_loops import fresh
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

from accum_plugin.accelerate import AccumulationHook
from corpus.case import Outcome, Setting

VOCABULARY, LENGTH, EXAMPLES = 13, 6, 5
SMALL = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)


def language_model() -> nn.Module:
    """A causal language model of a few hundred weights."""
    torch.manual_seed(5)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **SMALL)).double()


def image_classifier() -> nn.Module:
    """A classifier whose head forwards the count of examples to the loss."""
    torch.manual_seed(5)
    return ViTForImageClassification(ViTConfig(image_size=4, patch_size=2, num_labels=3, **SMALL)).double()


def sentences(num: int, ragged: bool = False) -> list[dict[str, Tensor]]:
    """Random token sequences, padded where they are ragged."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, VOCABULARY, (num, LENGTH), generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (num, 1), generator=generator) if ragged else torch.full((num, 1), LENGTH)
    labels = ids.where(torch.arange(LENGTH) < lengths, -100)
    return [{"input_ids": a, "labels": b} for a, b in zip(ids, labels)]


def images(num: int) -> list[dict[str, Tensor]]:
    """Random images and classes."""
    generator = torch.Generator().manual_seed(2)
    pixels = torch.randn(num, 3, 4, 4, generator=generator, dtype=torch.float64)
    classes = torch.randint(0, 3, (num,), generator=generator)
    return [{"pixel_values": a, "labels": b} for a, b in zip(pixels, classes)]


def token_loss(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """Next-token cross-entropy."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction=reduction)


def whole_gradient(data: list[dict[str, Tensor]]) -> list[list[float]]:
    """The gradient of one batch of everything, on one process."""
    model = language_model()
    ids, labels = (torch.stack([row[name] for row in data]) for name in ("input_ids", "labels"))
    token_loss(model(input_ids=ids).logits, labels).backward()
    return [_gradient(list(model.parameters()))]


def _gradient(parameters: list[Tensor]) -> list[float]:
    return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).tolist()


class _Recorder(TrainerCallback):
    """Keeps each step's gradient, as the optimizer sees it."""

    def __init__(self) -> None:
        self.gradients: list[list[float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **rest: Any) -> None:
        # not earlier: hooks run in the order in which they were registered, and the plugin's comes with prepare()
        optimizer.optimizer.register_step_pre_hook(self._step)

    def _step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.gradients.append(_gradient(optimizer.param_groups[0]["params"]))


def run(
    at: Setting,
    data: list[dict[str, Tensor]],
    *,
    kind: type[Trainer] = Trainer,
    model: Callable[[], nn.Module] = language_model,
    meant: Any = None,
    **keywords: Any,
) -> Outcome:
    """Train one epoch and report the gradient at every step."""
    fresh()
    net, recorder = model(), _Recorder()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.125)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=EXAMPLES,
            gradient_accumulation_steps=at.K,
            num_train_epochs=1,
            max_grad_norm=0.0,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer = kind(net, arguments, train_dataset=data, optimizers=(optimizer, None), **keywords)
        trainer.add_callback(recorder)
        hook = AccumulationHook.attach(trainer.accelerator, at.mode) if at.mode else None
        trainer.train()
    findings, windows = (list(hook.findings), list(hook.windows)) if hook else ([], [])
    if hook is not None:
        hook.detach()
    return Outcome(recorder.gradients, findings, windows, meant, trainer.accelerator.gradient_accumulation_steps)


class LocalMean(Trainer):
    """``compute_loss`` overridden: a mean over this microbatch, divided by nothing."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(input_ids=inputs["input_ids"])
        loss = token_loss(outputs.logits, inputs["labels"])
        return (loss, outputs) if return_outputs else loss


class GlobalMean(Trainer):
    """``compute_loss`` overridden: a sum over the count of all ranks, without the factor that undoes DDP's average."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(input_ids=inputs["input_ids"])
        loss = token_loss(outputs.logits, inputs["labels"], "sum") / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


def one_window(at: Setting) -> list[dict[str, Tensor]]:
    return sentences(at.n * at.K * EXAMPLES)


def local_mean(at: Setting) -> Outcome:
    data = one_window(at)
    return run(at, data, kind=LocalMean, meant=whole_gradient(data))


def count_ignored(at: Setting) -> Outcome:
    data = one_window(at)

    def loss_func(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return token_loss(outputs.logits, labels)

    return run(at, data, compute_loss_func=loss_func, meant=whole_gradient(data))


def global_mean(at: Setting) -> Outcome:
    data = one_window(at)
    return run(at, data, kind=GlobalMean, meant=whole_gradient(data))


def stock_language_model(at: Setting) -> Outcome:
    return run(at, sentences(at.n * (2 * at.K + at.m) * EXAMPLES, ragged=True))


def accelerator_has_one_step(outcome: Outcome) -> bool:
    """The Trainer accumulates by itself: its Accelerator's number of steps stays 1."""
    return outcome.note == 1 and all(window.microbatches > 1 for window in outcome.windows)


def stock_image_classifier(at: Setting) -> Outcome:
    return run(at, images(2 * at.n * at.K * EXAMPLES), model=image_classifier)
