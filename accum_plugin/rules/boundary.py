"""ACC201 to ACC209: what happens inside an accumulation window, and what belongs to its boundary.

Each docstring is the rule's published page. Symbols, as in every message: ``n`` data-parallel ranks, ``K``
accumulation steps, ``m`` microbatches really in the window.
"""

from __future__ import annotations

from accum_plugin.rules.base import Rule


class GradientsClearedInWindow(Rule):
    """Gradients zeroed before the window ended, or left over from another loss when it began.

    ## What it does
    Finds a `zero_grad()` between the first backward of a window and its optimizer step, and its counterpart: gradients
    that stand in `.grad` when a window begins, because another optimizer's loss put them there.

    ## Why is this bad?
    What was accumulated before is lost. Only the last microbatch survives, still divided by `K`: about `1/K` of the
    gradient, in another direction, from `1/K` of the examples that were paid for. Stale gradients are the opposite
    mistake: examples of another loss are added to the window.

    ## Example
    ```python
    for batch in loader:
        with accelerator.accumulate(model):
            optimizer.zero_grad()  # takes effect at the last microbatch, just before its backward
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
    ```

    ## Use instead
    ```python
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    ```
    With two optimizers in Lightning, put each loss between `self.toggle_optimizer(optimizer)` and
    `self.untoggle_optimizer(optimizer)`.

    ## Fix
    Never corrected: cleared gradients are gone.

    ## When it is silent
    When a prepared optimizer's `zero_grad()` after `step()` is skipped inside the window, which is how `accumulate()`
    works; when an optimizer is cleared at its own window's start while another one is in the middle of its own.

    ## Options
    - `mode`: `"raise"` stops before the first such step.
    - `ignore=("ACC201",)` silences it.

    ## References
    - https://github.com/starVLA/starVLA/issues/395
    - https://github.com/Lightning-AI/pytorch-lightning/issues/591
    """

    code = "ACC201"
    name = "gradients-cleared-in-window"
    why = "The optimizer steps with gradients that are not those of the whole window."
    remedy = "Call zero_grad() right after optimizer.step(), once per window."


class StepEveryMicrobatch(Rule):
    """The optimizer steps before the window has ended.

    ## What it does
    Finds optimizer steps in the middle of a window, with the number of microbatches each really had.

    ## Why is this bad?
    The effective batch is the microbatch, not the `K` microbatches configured. With the loss divided by `K`, each of
    the `K` updates has `1/K` of its gradient. If ranks synchronize only at the window's end, they step apart (ACC111).

    ## Example
    ```python
    accelerator = Accelerator()  # the 4 accumulation steps never got here
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            optimizer.step()  # every time
            optimizer.zero_grad()
    ```

    ## Use instead
    ```python
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            optimizer.step()  # skipped until the window has ended
            optimizer.zero_grad()
    ```
    An optimizer that was not prepared is not skipped: give it to `prepare()`. A loop that splits one loaded batch into
    slices steps at every slice of the loader's last batch: set
    `GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)`.

    ## Fix
    Never corrected: a step that was taken is not undone.

    ## When it is silent
    When a prepared optimizer's `step()` is called unguarded inside `accumulate()` and skipped; when several optimizers
    step at different cadences, each at the end of its own window; when `K` is 1.

    ## Options
    - `mode`: `"raise"` stops before the first such step.
    - `ignore=("ACC202",)` silences it.

    ## References
    - https://github.com/huggingface/diffusers/pull/308
    - https://github.com/modelscope/ms-swift/issues/2527
    - https://github.com/huggingface/accelerate/issues/1847
    """

    code = "ACC202"
    name = "step-every-microbatch"
    why = "The optimizer steps before the window has ended, so an update sees fewer examples than configured."
    remedy = (
        "Give the accumulation steps to the Accelerator or Trainer and prepare the optimizer, "
        "so that step() waits for the end of the window."
    )


class SchedulerPerMicrobatch(Rule):
    """The learning-rate scheduler advances other than once per optimizer step.

    ## What it does
    Counts scheduler steps between optimizer steps.

    ## Why is this bad?
    A scheduler stepped at every microbatch runs through its schedule `K` times too fast: warm-up is over after `1/K` of
    its length, and a cosine reaches its minimum after `1/K` of the training, where most of the run then stays.

    ## Example
    ```python
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            scheduler.step()  # not prepared: advances at every microbatch
            optimizer.zero_grad()
    ```

    ## Use instead
    ```python
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            scheduler.step()  # prepared: advances with the optimizer only
            optimizer.zero_grad()
    ```
    Unprepared, guard it: `if accelerator.sync_gradients: scheduler.step()`.

    ## Fix
    Never corrected: the schedule is the user's.

    ## When it is silent
    When a scheduler advances once per epoch; when Accelerate's prepared scheduler advances `n` times per optimizer
    step, which is its convention, and its horizon fits that (else ACC209); when a step skipped by fp16 overflow leaves
    the two one apart.

    ## Options
    - `mode`: `"raise"` stops at the first such window.
    - `ignore=("ACC203",)` silences it.

    ## References
    - https://github.com/starVLA/starVLA/pull/210
    - https://github.com/Lightning-AI/pytorch-lightning/issues/18828
    """

    code = "ACC203"
    name = "scheduler-per-microbatch"
    why = "The learning rate does not follow the schedule that was configured."
    remedy = "Step the scheduler once, right after optimizer.step(), or prepare it with the Accelerator."


class ClipPerMicrobatch(Rule):
    """Gradients clipped inside the window instead of once at its end.

    ## What it does
    Finds calls of `clip_grad_norm_` and `clip_grad_value_` before the last backward of a window, with the norms they
    saw.

    ## Why is this bad?
    Clipping is not linear: clipped pieces do not add up to the clipped whole. What is clipped is each time the sum so
    far, so that early microbatches are scaled down again and again, and the norm in the log is not the window's. Four
    microbatches of norm 2 in one direction, clipped at 1 each time, show norms 2, 3, 3, 3 where the window's is 8.

    ## Example
    ```python
    for index, batch in enumerate(loader):
        (loss_of(model, batch) / 4).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if (index + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    ```

    ## Use instead
    ```python
    for index, batch in enumerate(loader):
        (loss_of(model, batch) / 4).backward()
        if (index + 1) % 4 == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    ```
    In Lightning: `Trainer(gradient_clip_val=1.0)`, or override `configure_gradient_clipping`. With Accelerate:
    `if accelerator.sync_gradients: accelerator.clip_grad_norm_(model.parameters(), 1.0)`.

    ## Fix
    Never corrected: what clipping took away cannot be given back.

    ## When it is silent
    When the call comes once, after the window's last backward; when the norm is only measured (an infinite
    threshold); when a logged norm exceeds the threshold, since it is taken before clipping.

    ## Options
    - `mode`: `"raise"` stops before the step of the first such window.
    - `ignore=("ACC204",)` silences it.

    ## References
    - https://github.com/huggingface/accelerate/issues/641
    - https://github.com/huggingface/diffusers/pull/721
    - https://github.com/simchowitzlabpublic/nano-world-model/pull/22
    """

    code = "ACC204"
    name = "clip-per-microbatch"
    why = "Clipping is not linear: clipped pieces do not add up to the clipped whole."
    remedy = "Clip once, on the whole window's gradient, right before optimizer.step()."


class WindowNeverStepped(Rule):
    """The last microbatches of an epoch or of the training never reach an optimizer step.

    ## What it does
    Finds microbatches that were run backward after the last optimizer step, with their number, when training ends or
    when their gradients are cleared unused.

    ## Why is this bad?
    Their forward and backward passes are paid for and thrown away. If nothing clears them, their gradients leak into
    the first window of the next epoch, which then holds more than `K` microbatches.

    ## Example
    ```python
    for index, batch in enumerate(loader):  # 10 batches: the last 2 are never stepped
        (loss_of(model, batch) / 4).backward()
        if (index + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    ```

    ## Use instead
    ```python
    for index, batch in enumerate(loader):
        window_start = index - index % 4
        microbatches = min(4, len(loader) - window_start)
        (loss_of(model, batch) / microbatches).backward()
        if index + 1 == window_start + microbatches:
            optimizer.step()
            optimizer.zero_grad()
    ```

    ## Fix
    Never corrected: whether to step, drop or carry over an incomplete window is the user's decision.

    ## When it is silent
    When the loop steps at the last batch; when a limit in microbatches (`max_steps`, `limit_train_batches`) stops at a
    window's end; when training is interrupted.

    ## Options
    - `mode`: `"warn"` and `"fix"` report it alike.
    - `ignore=("ACC205",)` declares that dropping the incomplete window is meant.

    ## References
    - https://github.com/Lightning-AI/pytorch-lightning/issues/4653
    - https://github.com/Lightning-AI/pytorch-lightning/issues/1549
    """

    code = "ACC205"
    name = "window-never-stepped"
    why = "These examples never change the model, or leak into the next window."
    remedy = "Step at the last batch too, divided by the microbatches really in the window, or drop it on purpose."


class AmpOrder(Rule):
    """Clipped before unscaling, or the fp16 scaler updated inside a window.

    ## What it does
    Watches a `GradScaler`: gradients that are clipped while they still carry the loss scale, and `update()` before the
    window's last backward.

    ## Why is this bad?
    The scale is 65536 at first. A threshold of 1.0 that meets scaled gradients clips at 1/65536, always, and the bound
    drifts as the scale changes. An `update()` inside a window may change the scale between two microbatches, and adds
    gradients of different scales. Scaling for fp16 and dividing for accumulation are different things: the first is
    undone before the step, the second is not.

    ## Example
    ```python
    scaler.scale(loss_of(model, batch) / 4).backward()
    if (index + 1) % 4 == 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # still scaled
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    ```

    ## Use instead
    ```python
    scaler.scale(loss_of(model, batch) / 4).backward()
    if (index + 1) % 4 == 0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    ```

    ## Fix
    Never corrected: the plugin scales gradients only after they are unscaled, and leaves the scaler alone.

    ## When it is silent
    With bf16 or fp32, where there is no scaler; when `accelerator.clip_grad_norm_` or `Trainer(gradient_clip_val=...)`
    unscales first; when an overflow skips a step, which is counted and not a mistake.

    ## Options
    - `mode`: `"raise"` stops before the step of the first such window.
    - `ignore=("ACC206",)` silences it.

    ## References
    - https://github.com/Lightning-AI/pytorch-lightning/issues/9694
    - https://docs.pytorch.org/docs/stable/notes/amp_examples.html
    """

    code = "ACC206"
    name = "amp-order"
    why = "The fp16 loss scale is still in the gradients, or changes while they are being added up."
    remedy = (
        "At the end of the window call scaler.unscale_(optimizer), clip, scaler.step(optimizer) and scaler.update(), "
        "in this order."
    )


class SyncEveryMicrobatch(Rule):
    """Gradients reduced over the ranks at every microbatch although only the last needs it.

    ## What it does
    Counts reductions in a window: `K` where one would do.

    ## Why is this bad?
    It is not wrong, only slow: averages of sums are sums of averages. Each reduction sends about `2 (n - 1) / n` times
    the bytes of the gradients per rank, `K` times instead of once.

    ## Example
    ```python
    for index, batch in enumerate(loader):
        (loss_of(ddp_model, batch) / 4).backward()  # reduces at every microbatch
        if (index + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    ```

    ## Use instead
    ```python
    for index, batch in enumerate(loader):
        last = (index + 1) % 4 == 0
        with contextlib.nullcontext() if last else ddp_model.no_sync():
            (loss_of(ddp_model, batch) / 4).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    ```

    ## Fix
    Nothing to correct: the gradient is right.

    ## When it is silent
    On one rank; when `no_sync`, `require_backward_grad_sync` or `set_requires_gradient_sync` already defers the
    reduction; when the wrapper must reduce at every microbatch to hold sharded gradients (ZeRO-2, FSDP without
    `no_sync`), or `sync_each_batch=True` asks for it to save memory.

    ## Options
    - `ignore=("ACC207",)` silences it.

    ## References
    - https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
    - https://huggingface.co/docs/accelerate/concept_guides/gradient_synchronization
    """

    code = "ACC207"
    name = "sync-every-microbatch"
    why = "The result is right, but all reductions of a window except the last are wasted communication."
    remedy = "Run all microbatches but the last of a window under no_sync()."


class BackwardBypassed(Rule):
    """`loss.backward()` called where the framework's own backward was due.

    ## What it does
    Finds a plain `loss.backward()` inside `accelerator.accumulate()` or in a `LightningModule`, where
    `accelerator.backward(loss)` or `self.manual_backward(loss)` was due.

    ## Why is this bad?
    The framework's backward divides by `K` (Accelerate), applies the fp16 loss scale, and prepares the reduction over
    ranks. Without it the gradient is `K` times too large (ACC104), fp16 gradients underflow, or ranks part (ACC111).

    ## Example
    ```python
    accelerator = Accelerator(gradient_accumulation_steps=4)
    with accelerator.accumulate(model):
        loss_of(model, batch).backward()  # divided by nothing
        optimizer.step()
        optimizer.zero_grad()
    ```

    ## Use instead
    ```python
    accelerator = Accelerator(gradient_accumulation_steps=4)
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    ```

    ## Fix
    Corrected as far as it is a scale (ACC104: the missing division); a missing loss scale or reduction is only
    reported.

    ## When it is silent
    When the loop divides by `K` itself and owns its window, with an `Accelerator` left at one accumulation step;
    outside training.

    ## Options
    - `mode`: `"raise"` stops before the first such step.
    - `ignore=("ACC208",)` silences it; ACC104 still checks the scale.

    ## References
    - https://github.com/huggingface/accelerate/blob/main/src/accelerate/accelerator.py (the docstring of `accumulate`)
    - https://github.com/Lightning-AI/pytorch-lightning/issues/9237
    """

    code = "ACC208"
    name = "backward-bypassed"
    why = "The framework's own backward divides by the accumulation steps, scales for fp16 and prepares the reduction."
    remedy = "Call accelerator.backward(loss) or self.manual_backward(loss) instead of loss.backward()."


class SchedulerHorizon(Rule):
    """Scheduler length counted in microbatches or epochs, although it advances per optimizer step.

    ## What it does
    Compares the length of a schedule (`OneCycleLR`, cosine, linear, polynomial, warm-up) with the number of times it
    will advance until training ends, and gives both.

    ## Why is this bad?
    A horizon in microbatches is `K` times too long: the learning rate never comes down, and a warm-up may last for the
    whole training. A schedule sized in steps that advances once per epoch hardly moves at all. One that is too short
    ends early; a cosine then climbs again.

    ## Example
    ```python
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=10_000)
        return [optimizer], [scheduler]  # Lightning's interval is "epoch" unless told otherwise
    ```

    ## Use instead
    ```python
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        total = int(self.trainer.estimated_stepping_batches)  # optimizer steps, accumulation included
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
    ```
    With Accelerate's prepared scheduler, which advances `n` times per optimizer step unless `split_batches=True`, size
    it for `optimizer_steps * accelerator.num_processes`.

    ## Fix
    Never corrected: the schedule is the user's. The message gives the length to set.

    ## When it is silent
    When length and advances agree; when a prepared scheduler's horizon holds the factor `n`; for schedules without
    an end, and where the length of the training is unknown.

    ## Options
    - `ignore=("ACC209",)` silences it, for a schedule that is meant to be cut off.

    ## References
    - https://github.com/huggingface/accelerate/issues/2773
    - https://github.com/Lightning-AI/pytorch-lightning/issues/5631
    """

    code = "ACC209"
    name = "scheduler-horizon"
    why = "The length of the schedule is counted in another unit than its steps, so it ends too early or never."
    remedy = "Size warm-up and total length in the unit in which the scheduler advances, normally optimizer steps."
