"""A LightningModule's loss, run once more: for opening opaque losses and for the equivalence check."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature


@contextlib.contextmanager
def muted(module: LightningModule) -> Iterator[None]:
    """Let ``self.log`` and ``self.log_dict`` do nothing: a rerun is no training step and must not be logged."""
    names = ("log", "log_dict")
    before = {name: vars(module)[name] for name in names if name in vars(module)}
    for name in names:
        object.__setattr__(module, name, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        for name in names:
            object.__delattr__(module, name)
        for name, value in before.items():
            object.__setattr__(module, name, value)


def training_loss(trainer: Trainer, module: LightningModule) -> Callable[[Any], Any] | None:
    """Return a function from a batch to ``training_step``'s loss, or ``None`` where a rerun would do more than that.

    Manual optimization runs backward passes and steps inside ``training_step``, and a step that takes the loader's
    iterator draws batches: neither can be run again.
    """
    step = module.training_step
    if not module.automatic_optimization or is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
        return None
    takes_index = is_param_in_hook_signature(step, "batch_idx", min_args=2)

    def loss(batch: Any) -> Any:
        index = trainer.fit_loop.epoch_loop.batch_idx
        with muted(module), trainer.precision_plugin.train_step_context():
            output = step(batch, index) if takes_index else step(batch)
        return output.get("loss") if isinstance(output, Mapping) else output

    return loss
