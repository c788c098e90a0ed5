"""ACC401 and ACC402: which examples an update really sees.

Each docstring is the rule's published page.
"""

from __future__ import annotations

from accum_plugin.rules.base import Rule


class EffectiveBatchChanged(Rule):
    """Resumed with another effective batch and the same learning rate.

    ## What it does
    Saves the effective batch, its factors (microbatch, accumulation steps, ranks) and the learning rate with the
    checkpoint, and compares them when training resumes.

    ## Why is this bad?
    Another effective batch is another number of updates per example and another noise scale. A learning rate tuned for
    64 examples per update is not the one for 16; resumed on 2 ranks instead of 8 with everything else unchanged, a run
    goes on with exactly that.

    ## Example
    ```python
    # saved by: 8 ranks x 2 accumulation steps x 4 examples = 64
    trainer = Trainer(devices=2, accumulate_grad_batches=2)  # 2 x 2 x 4 = 16
    trainer.fit(model, DataLoader(dataset, batch_size=4), ckpt_path="last.ckpt")
    ```

    ## Use instead
    ```python
    trainer = Trainer(devices=2, accumulate_grad_batches=8)  # 2 x 8 x 4 = 64
    trainer.fit(model, DataLoader(dataset, batch_size=4), ckpt_path="last.ckpt")
    ```

    ## Fix
    Never corrected: the plugin changes neither the data loader nor the learning rate.

    ## When it is silent
    When the product is the same, however it is split; when the learning rate was changed too; when the checkpoint
    was saved without the plugin.

    ## Options
    - `ignore=("ACC401",)` accepts the change.

    ## References
    - https://arxiv.org/abs/1706.02677 (learning rate and batch size)
    - https://arxiv.org/abs/1812.06162 (noise scale)
    """

    code = "ACC401"
    name = "effective-batch-changed"
    why = "The learning rate was chosen for another effective batch."
    remedy = "Keep microbatch x accumulation steps x ranks as it was, or choose the learning rate again."


class DuplicatedSamples(Rule):
    """Padding duplicates samples in the last window.

    ## What it does
    Counts examples that a sampler repeats so that all ranks get equally many: `DistributedSampler` without `drop_last`,
    and Accelerate's `even_batches`.

    ## Why is this bad?
    Repeated examples count twice in their update, and always the same few when the order is fixed. With 5 examples, 2
    ranks and a batch of 2, `even_batches` makes 8 of 5: 3 repeats, more than half of the data. `effective_batch` in the
    log says how many were distinct.

    ## Example
    ```python
    accelerator = Accelerator()  # even_batches=True: repeats examples until the ranks are even
    loader = accelerator.prepare(DataLoader(five_examples, batch_size=2))
    ```

    ## Use instead
    ```python
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
    loader = accelerator.prepare(DataLoader(five_examples, batch_size=2))
    with accelerator.join_uneven_inputs([model]):
        train(model, loader)
    ```
    Or drop the incomplete batches: `DataLoader(..., drop_last=True)`, `DistributedSampler(..., drop_last=True)`.

    ## Fix
    Never corrected: which examples are loaded is the user's decision.

    ## When it is silent
    When the number of examples divides evenly; with `drop_last=True`; on one rank; when the data set's length is
    unknown.

    ## Options
    - `ignore=("ACC402",)` accepts the repeats.

    ## References
    - https://github.com/huggingface/accelerate/issues/2316
    - https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler
    """

    code = "ACC402"
    name = "duplicated-samples"
    why = "Repeated examples count twice, and the effective batch holds fewer distinct examples than it seems."
    remedy = "Drop the incomplete batch (drop_last=True), or accept the repeats with ignore=('ACC402',)."
