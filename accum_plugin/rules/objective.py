"""ACC301 to ACC303: what accumulation does not reproduce, whatever the scale.

Each docstring is the rule's published page.
"""

from __future__ import annotations

from accum_plugin.rules.base import Rule


class BatchStatistics(Rule):
    """BatchNorm and kin see the microbatch, not the effective batch.

    ## What it does
    Lists layers in training mode that compute statistics over the batch (`BatchNorm1d/2d/3d`, `SyncBatchNorm`) in a run
    that accumulates or is data-parallel, with the number of examples they really see.

    ## Why is this bad?
    Accumulation adds gradients of microbatches, each normalized by its own mean and variance. No factor turns them into
    the gradient of the large batch, and with microbatches of a few examples the statistics are noisy. The running
    statistics are updated `K` times per optimizer step.

    ## Example
    ```python
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU())
    trainer = Trainer(accumulate_grad_batches=16)  # 16 x 2 examples are not one batch of 32 for BatchNorm
    ```

    ## Use instead
    ```python
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.GroupNorm(32, 64), nn.ReLU())
    trainer = Trainer(accumulate_grad_batches=16)
    ```
    Or keep pretrained statistics: put the BatchNorm layers in `eval()`. `SyncBatchNorm` reaches over ranks, not over
    microbatches.

    ## Fix
    Nothing to correct: the objective differs, not its scale. Said once, as information.

    ## When it is silent
    When the layers are in evaluation mode or the model has none; at one microbatch on one rank; dropout draws anew in
    each pass, which does not change the objective and is never reported.

    ## Options
    - `verify=True` measures how large the difference is.
    - `ignore=("ACC301",)` accepts it.

    ## References
    - https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html
    - https://arxiv.org/abs/1803.08494 (group normalization)
    """

    code = "ACC301"
    name = "batch-statistics"
    why = "Accumulation cannot reproduce the effective batch's statistics, so the update depends on the microbatch."
    remedy = (
        "Use a normalization without batch statistics (GroupNorm, LayerNorm) or freeze these layers in eval(), "
        "or accept it with ignore=('ACC301',)."
    )


class CoupledLoss(Rule):
    """The loss compares examples with each other: accumulation changes the objective.

    ## What it does
    Recognizes losses that are neither mean-like nor sum-like in the batch: contrastive losses (InfoNCE, CLIP),
    in-batch negatives, losses over gathered features. A batch is compared with its two halves.

    ## Why is this bad?
    With `K` microbatches of `b` examples each example is compared with `b - 1` others, not with `K b - 1`. The task is
    easier and the gradient another; there is no weight per example, so nothing can be corrected by a factor.

    ## Example
    ```python
    def training_step(self, batch, batch_idx):  # Trainer(accumulate_grad_batches=8)
        queries, keys = self.encode(batch)
        scores = queries @ keys.T / 0.07  # negatives from this microbatch only
        return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))
    ```

    ## Use instead
    ```python
    def training_step(self, batch, batch_idx):  # negatives from a queue that outlives the microbatch
        queries, keys = self.encode(batch)
        scores = queries @ torch.cat([keys, self.queue]).T / 0.07
        self.queue = torch.cat([keys.detach(), self.queue])[:4096]
        return F.cross_entropy(scores, torch.arange(len(queries), device=scores.device))
    ```
    Or reproduce the large batch exactly with cached gradients (GradCache): embed all microbatches first, take the
    loss over all embeddings, then run backward through each microbatch.

    ## Fix
    Never corrected. Said once, and the rules of scale keep quiet about such a loss.

    ## When it is silent
    When the loss is a sum or mean of terms of single examples, pairs that lie in one example included; when features
    are gathered and the loss is multiplied by `n` to undo the average of the ranks, which is right.

    ## Options
    - `normalization`: declares what the window's gradient is meant to be, where the verdict is wrong.
    - `ignore=("ACC302",)` accepts it.

    ## References
    - https://github.com/texttron/tevatron/issues/30
    - https://arxiv.org/abs/2101.06983 (cached gradients)
    """

    code = "ACC302"
    name = "coupled-loss"
    why = "Splitting the batch changes the objective, and no factor restores it."
    remedy = "Compare over the whole window (cached gradients, a queue), or accept it with ignore=('ACC302',)."


class NotEquivalent(Rule):
    """One step of the real run and the same examples as one batch on one process disagree.

    ## What it does
    Reports the outcome of the one-step equivalence check (`verify=True` or `check_equivalence`): the best-fit factor
    between the two gradients, their cosine, and the parameter that differs most.

    ## Why is this bad?
    It is the decisive test, and it needs no theory: the update must not depend on how the same examples are split over
    microbatches and ranks. A factor of `1/n`, `n`, `1/K` or `K` with cosine 1 is a division too many or too few; a
    cosine below 1 means that units weigh differently or that the objective itself depends on the split.

    ## Example
    ```python
    callback = AccumulationCallback(verify=True)  # K = 4, training_step returns loss / 4
    Trainer(accumulate_grad_batches=4, callbacks=[callback]).fit(model)
    print(callback.findings[0].factor)  # 0.25
    ```

    ## Use instead
    ```python
    callback = AccumulationCallback(verify=True)  # K = 4, training_step returns the undivided loss
    Trainer(accumulate_grad_batches=4, callbacks=[callback]).fit(model)
    print(callback.findings)  # []
    ```

    ## Fix
    Not corrected by itself: the rule that names the cause does that. If this one stands alone, the cause is unknown.

    ## When it is silent
    When the two agree within a tolerance that comes from the arithmetic (data type and length of the sums); when the
    check could not run, which it says. Dropout and other random layers are controlled for.

    ## Options
    - `verify=True` runs the check in the first window.
    - `normalization`: `"sum"` or `"mean"` declares what the one-batch gradient is.
    - `ignore=("ACC303",)` silences it.

    ## References
    - https://github.com/huggingface/transformers/issues/34242
    - https://huggingface.co/blog/gradient_accumulation
    """

    code = "ACC303"
    name = "not-equivalent"
    why = "The update depends on how the same examples are split over microbatches and ranks."
    remedy = "Look at the other findings for the cause: a factor is a division, a cosine below one is a weighting."
