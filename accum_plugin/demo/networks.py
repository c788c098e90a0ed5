"""The demo's two networks, their data, and the losses a user might write for them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

LOCAL_BATCH = 16
IGNORED = -100  # cross_entropy's own default for targets that do not count
LEARNING_RATE = 0.1
CONTEXT = 6  # bytes that the language model sees


class RecordingSGD(torch.optim.SGD):
    """Plain SGD that keeps, for every step, the weights before it and the gradient it really applied.

    The gradient is read off the weights, ``(before - after) / lr``: whatever happened on the way is in it.
    """

    def __init__(self, module: RecordingModule) -> None:
        super().__init__(module.parameters(), lr=LEARNING_RATE)
        self._module = module

    def step(self, closure: Any = None) -> Any:
        """Step, then file the microbatches of the window with the weights and the gradient."""
        before = [parameter.detach().clone() for parameter in self._module.parameters()]
        loss = super().step(closure)
        after = [parameter.detach() for parameter in self._module.parameters()]
        gradient = [(old - new) / LEARNING_RATE for old, new in zip(before, after, strict=True)]
        self._module.steps.append((self._module.window, before, gradient))
        self._module.window = []
        return loss


class RecordingModule(LightningModule):
    """Base of the demo's modules: float64, seeded, and it remembers the batches of every window."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        self.loss = loss
        self.window: list[Any] = []
        self.steps: list[tuple[list[Any], list[Tensor], list[Tensor]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss that this run's user wrote."""
        self.window.append(batch)
        inputs, targets = batch
        logits = self(inputs).reshape(targets.numel(), -1)
        if self.loss == "local":
            return functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED)
        return functional.cross_entropy(logits, targets.flatten(), reduction="sum") / (
            len(targets) * self.trainer.world_size
        )

    def reference_loss(self, windows: list[list[Any]]) -> Tensor:
        """Return the loss of all ranks' microbatches as one batch: the mean over every unit."""
        inputs, targets = self.join([batch for window in windows for batch in window])
        return functional.cross_entropy(self(inputs).flatten(0, -2), targets.flatten(), ignore_index=IGNORED)

    def join(self, batches: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Put microbatches together into one batch."""
        inputs, targets = zip(*batches, strict=True)
        return torch.cat(inputs), torch.cat(targets)

    def configure_optimizers(self) -> RecordingSGD:
        """Return the recording optimizer."""
        return RecordingSGD(self)


class DigitsNetwork(RecordingModule):
    """Two layers on scikit-learn's digits (64 pixels, 10 classes)."""

    def __init__(self, loss: str) -> None:
        super().__init__(loss)
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()

    def forward(self, pixels: Tensor) -> Tensor:
        """Map pixels (batch, 64) to logits (batch, 10)."""
        return self.layers(pixels)


class ByteModel(RecordingModule):
    """A byte-level language model: embedding, one causal convolution, logits over 256 bytes."""

    def __init__(self, loss: str) -> None:
        super().__init__(loss)
        torch.manual_seed(2)
        self.embedding = nn.Embedding(256, 16).double()
        self.convolution = nn.Conv1d(16, 24, kernel_size=CONTEXT).double()
        self.head = nn.Linear(24, 256).double()

    def forward(self, text: Tensor) -> Tensor:
        """Map bytes (batch, length) to logits (batch, length, 256)."""
        seen = functional.pad(self.embedding(text).mT, (CONTEXT - 1, 0))
        return self.head(torch.tanh(self.convolution(seen)).mT)

    def join(self, batches: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Put microbatches of different lengths together, padded at the right."""
        inputs = [row for batch, _ in batches for row in batch]
        targets = [row for _, batch in batches for row in batch]
        return pad_sequence(inputs, True), pad_sequence(targets, True, IGNORED)


def digits(rows: int) -> torch.utils.data.TensorDataset:
    """Return the first ``rows`` digits: pixels in 0 to 1 (float64) and classes."""
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    return torch.utils.data.TensorDataset(torch.tensor(pixels[:rows]) / 16, torch.tensor(classes[:rows]).long())


def paragraphs(rows: int) -> list[Tensor]:
    """Return paragraphs of the standard library's argparse as bytes, 8 to 512 long: really ragged."""
    text = Path(argparse.__file__).read_bytes()
    pieces = [piece[:512] for piece in text.split(b"\n\n") if len(piece) >= 8]
    return [torch.tensor(list(pieces[row % len(pieces)])) for row in range(rows)]


def next_byte_batch(pieces: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Collate byte strings into padded inputs and the bytes that follow them; padding is ignored."""
    inputs = pad_sequence([piece[:-1] for piece in pieces], True)
    return inputs, pad_sequence([piece[1:] for piece in pieces], True, IGNORED)
