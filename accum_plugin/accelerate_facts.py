"""What an Accelerator says about loaders, schedulers and windows, in the session's terms."""

from __future__ import annotations

import gc
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accum_plugin.neighbors import Announcement, Padding, Schedule
from accum_plugin.neighbors.samplers import even_padding


def find_wrappers(accelerator: Accelerator) -> list[nn.Module]:
    """The DDP wrappers of models that were prepared earlier: the Accelerator itself keeps the models without them."""
    models = {id(model) for model in accelerator._models}
    if accelerator.num_processes == 1 or not models:
        return []
    wrappers = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
    return [wrapper for wrapper in wrappers if id(wrapper.module) in models]


def announcement(accelerator: Accelerator, explicit: bool, prepared: bool, num_batches: int) -> Announcement:
    """What the Accelerator says about the window at an optimizer step.

    Args:
        accelerator: The Accelerator.
        explicit: Whether the loop uses ``accumulate()``.
        prepared: Whether the optimizer was prepared.
        num_batches: Batches drawn from the loader so far.
    """
    state = accelerator.gradient_state
    every_slice = explicit and state.sync_with_dataloader and state.end_of_dataloader
    return Announcement(explicit, accelerator.sync_gradients, prepared, num_batches if every_slice else None)


def loader_padding(loader: Any) -> Padding | None:
    """Repeats that a prepared loader adds so that all ranks get equally many batches; ``None`` for none.

    Args:
        loader: A loader that ``accelerator.prepare`` has returned.
    """
    sampler = getattr(loader, "batch_sampler", None)
    if isinstance(loader, DataLoaderDispatcher):
        padded = loader.state.num_processes > 1 and not loader._drop_last
    else:
        padded = isinstance(sampler, BatchSamplerShard) and sampler.even_batches and not sampler.drop_last
    try:
        size = len(loader.dataset)
    except TypeError:  # an iterable data set knows no length
        return None
    return even_padding(size, loader.total_batch_size) if padded and loader.total_batch_size else None


def schedules(accelerator: Accelerator) -> list[Schedule]:
    """The prepared schedulers; each advances ``n`` times per optimizer step unless batches are split."""
    found = []
    for prepared in accelerator._schedulers:
        every_rank = prepared.step_with_optimizer and not prepared.split_batches
        per_step = accelerator.num_processes if every_rank else 1
        found.append(Schedule(prepared.scheduler, per_step=per_step, managed=True))
    return found


def skipped_by_bypass(accelerator: Accelerator, explicit: bool, scaled: bool) -> tuple[str, ...]:
    """What ``accelerator.backward`` does that a plain ``loss.backward()`` leaves out.

    Args:
        accelerator: The Accelerator.
        explicit: Whether the loop uses ``accumulate()``, and so relies on the division.
        scaled: Whether the loop has scaled the loss for fp16 itself.
    """
    skipped = []
    if explicit and accelerator.gradient_accumulation_steps > 1:
        skipped.append(f"the division by {accelerator.gradient_accumulation_steps}")
    if accelerator.scaler is not None and not scaled:
        skipped.append("the fp16 loss scale")
    return tuple(skipped)
