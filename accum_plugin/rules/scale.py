"""ACC101 to ACC111: the gradient's scale, and the weights of the units in it.

Each docstring is the rule's published page. Symbols, as in every message: ``n`` data-parallel ranks, ``K``
accumulation steps, ``m`` microbatches really in the window, ``N`` units (examples, tokens) over the window and
all ranks.
"""

from __future__ import annotations

from accum_plugin.rules.base import Rule


class GlobalMeanAveraged(Rule):
    """Loss divided by the global count, gradients averaged over the ranks: 1/n of the gradient.

    ## What it does
    Finds losses that are divided by a count taken over all ranks (examples or tokens) while the wrapper averages
    the gradients over the same ranks.

    ## Why is this bad?
    The `n` ranks are divided out twice. The gradient is `1/n` of the one meant: with 8 ranks of 32 examples, 256 in
    all, 8 times too small. Nothing crashes, Adam hides it, and a learning rate tuned this way is wrong as soon as
    the number of ranks changes.

    ## Example
    ```python
    count = torch.tensor(float(len(x)), device=x.device)
    torch.distributed.all_reduce(count)  # the global batch
    loss = F.cross_entropy(ddp_model(x), y, reduction="sum") / count
    loss.backward()  # DDP divides by n once more
    ```

    ## Use instead
    ```python
    count = torch.tensor(float(len(x)), device=x.device)
    torch.distributed.all_reduce(count)
    ranks = torch.distributed.get_world_size()
    loss = F.cross_entropy(ddp_model(x), y, reduction="sum") * ranks / count
    loss.backward()  # DDP divides by n, which leaves 1 / count
    ```
    With equal batches on every rank, `F.cross_entropy(ddp_model(x), y)` says the same.

    ## Fix
    Corrected: the loss is multiplied by `n`, or, with `rewrite="reduction"`, the ranks are summed.

    ## When it is silent
    When the ranks are summed (a sum hook, FSDP2 with divide factor 1); when the loss is multiplied by `n` to undo the
    average; when the gradients are multiplied after backward, as fairseq does.

    ## Options
    - `rewrite`: `"loss"` scales the loss, `"reduction"` makes the wrapper sum.
    - `normalization`: `"sum"` declares that the gradient of the sum is meant.
    - `ignore=("ACC101",)` silences it.

    ## References
    - https://github.com/pytorch/torchtune/pull/2172
    - https://github.com/lightly-ai/lightly/issues/1977
    """

    code = "ACC101"
    corrects = True
    name = "global-mean-averaged"
    why = (
        "A loss already divided by the global count is divided once more by the average over ranks, "
        "so every update is too small."
    )
    remedy = "Multiply the loss by the number of ranks, or sum the gradients over the ranks instead of averaging them."


class LocalMeanSummed(Rule):
    """Local mean, gradients summed over the ranks: n times the gradient.

    ## What it does
    Finds losses that are a mean over the rank's own batch while the gradients of all ranks are added and never
    divided by `n`.

    ## Why is this bad?
    The sum of `n` means is `n` times the mean. The learning rate then depends on the number of ranks: a run moved from
    2 to 8 ranks takes steps 4 times as long, and may diverge for no visible reason.

    ## Example
    ```python
    def sum_hook(group, bucket):
        work = torch.distributed.all_reduce(bucket.buffer(), group=group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    ddp_model.register_comm_hook(None, sum_hook)
    loss = F.cross_entropy(ddp_model(x), y)  # a mean over this rank's batch
    loss.backward()
    ```

    ## Use instead
    ```python
    loss = F.cross_entropy(ddp_model(x), y)
    loss.backward()  # no hook: DDP averages
    ```
    Or keep the sum hook and divide by the global batch: `F.cross_entropy(..., reduction="sum") / global_batch`.

    ## Fix
    Corrected: the loss is multiplied by `1/n`, or, with `rewrite="reduction"`, the ranks are averaged.

    ## When it is silent
    When a sum hook meets a loss that is divided by the global count; when the hook divides by `n` itself, as the
    built-in fp16 and bf16 compression hooks do; when a loss of gathered features is multiplied by `n` to undo the
    average.

    ## Options
    - `rewrite`: `"loss"` scales the loss, `"reduction"` makes the wrapper average.
    - `normalization`: `"sum"` declares that the gradient of the sum is meant.
    - `ignore=("ACC102",)` silences it.

    ## References
    - https://github.com/pytorch/pytorch/pull/42399
    - https://github.com/texttron/tevatron/issues/143
    """

    code = "ACC102"
    corrects = True
    name = "local-mean-summed"
    why = (
        "Means over the local batch are added over the ranks and never divided by their number, "
        "so every update is too large."
    )
    remedy = "Average the gradients over the ranks, or divide the loss by the global count; one of the two, not both."


class AccumulationDividedTwice(Rule):
    """Loss divided by K by the user and again by the framework: 1/K of the gradient.

    ## What it does
    Finds a loss that is divided by the accumulation steps in the training code, and again by what runs the backward
    pass: Lightning's automatic optimization, `accelerator.backward`, or the DeepSpeed engine.

    ## Why is this bad?
    The gradient is `1/K` of the one meant. With SGD, so is every update; with Adam the update hardly changes, but
    weight decay, epsilon and the clipping threshold now meet gradients of another size.

    ## Example
    ```python
    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        return loss / self.trainer.accumulate_grad_batches  # Lightning divides by it again
    ```

    ## Use instead
    ```python
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])
    ```
    With Accelerate: `accelerator.backward(loss)` of an `Accelerator(gradient_accumulation_steps=4)`, undivided.

    ## Fix
    Corrected: the loss is multiplied by `K`. Where a framework divides twice (Lightning and the DeepSpeed engine each
    divide by their own `K`), the message says that the training code is innocent.

    ## When it is silent
    When only one side divides: manual optimization, or an `Accelerator` left at one accumulation step with an own
    modulo. A coefficient that happens to equal `1/K`, such as `0.5 * mse` with `K = 2`, is left alone: a constant is
    called a mistake only when something else agrees, for example when it changes as `K` does.

    ## Options
    - `normalization`: `"mean"` declares that the gradient of the mean is meant.
    - `mode`: `"warn"` leaves the gradient as it is, `"raise"` stops before the first wrong step.
    - `ignore=("ACC103",)` silences it.

    ## References
    - https://github.com/huggingface/accelerate/issues/3533
    - https://github.com/roboflow/rf-detr/issues/1503
    - https://github.com/Lightning-AI/pytorch-lightning/issues/6170
    - https://github.com/deepspeedai/DeepSpeed/issues/7439
    """

    code = "ACC103"
    corrects = True
    name = "accumulation-divided-twice"
    why = "Two places each divide by the accumulation steps, so every update is too small."
    remedy = "Return the undivided loss and leave the division to the framework."


class AccumulationNotDivided(Rule):
    """Mean losses added up over K microbatches and never divided: K times the gradient.

    ## What it does
    Finds windows in which every microbatch's loss is a mean and nothing divides by the number of microbatches, neither
    the code nor the framework.

    ## Why is this bad?
    The sum of `K` means is `K` times the mean over the window. Raising `K` to save memory then raises the effective
    learning rate by the same factor, although it should change nothing.

    ## Example
    ```python
    def training_step(self, batch, batch_idx):  # self.automatic_optimization = False
        optimizer = self.optimizers()
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.manual_backward(loss)  # manual optimization divides by nothing
        if (batch_idx + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    ```

    ## Use instead
    ```python
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.manual_backward(loss / 4)
        if (batch_idx + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    ```
    With transformers' Trainer, a `compute_loss` that returns a mean sets `loss_is_scaled_for_ga` to `False`; one that
    takes `num_items_in_batch` divides its sum by it and multiplies by the number of processes.

    ## Fix
    Corrected: the gradient is divided by the `m` microbatches that the window really holds.

    ## When it is silent
    When the loss is a sum over the window's count; when the gradients are divided after backward; when a loss of
    several terms is a declared sum of means: eight summed means are an objective, not a factor of eight.

    ## Options
    - `normalization`: `"sum"` declares that the undivided sum is meant.
    - `units`: counts a microbatch's units where the graph of the loss cannot.
    - `ignore=("ACC104",)` silences it.

    ## References
    - https://github.com/Lightning-AI/pytorch-lightning/issues/12811
    - https://github.com/Lightning-AI/pytorch-lightning/issues/17957
    - https://github.com/MakazhanAlpamys/Soup/issues/720
    - https://github.com/huggingface/transformers/pull/36426
    - https://github.com/deepspeedai/DeepSpeed/pull/7724
    """

    code = "ACC104"
    corrects = True
    name = "accumulation-not-divided"
    why = (
        "Mean losses of a window are added up and never divided by their number, "
        "so the update grows with the accumulation steps."
    )
    remedy = "Divide each mean loss by the accumulation steps, or let the framework's backward do it."


class PartialWindow(Rule):
    """Last window of an epoch holds m < K microbatches and is divided by K: m/K of the gradient.

    ## What it does
    Finds windows that end before `K` microbatches (the end of an epoch, an epoch shorter than `K`, a microbatch whose
    step returned `None`) and are still divided by `K`.

    ## Why is this bad?
    The window's examples weigh `m/K` of all others. Of 10 batches with `K = 4` the last window holds 2, and its
    gradient is half of what it should be. With an epoch shorter than `K`, every step is wrong.

    ## Example
    ```python
    trainer = Trainer(accumulate_grad_batches=4, max_epochs=10)
    trainer.fit(model, DataLoader(dataset_of_10_batches, batch_size=8))  # windows of 4, 4, 2; each divided by 4
    ```

    ## Use instead
    ```python
    trainer = Trainer(
        accumulate_grad_batches=4,
        max_epochs=10,
        limit_train_batches=8,  # whole windows only: 4, 4
    )
    trainer.fit(model, DataLoader(dataset_of_10_batches, batch_size=8))
    ```
    In an own loop, divide by what the window holds: `loss / min(4, batches - start)`.

    ## Fix
    Corrected: the window is weighted by what it really holds, so that each unit counts the same.

    ## When it is silent
    When the loop already divides by the window's own count, as transformers' Trainer does; when the incomplete window
    is dropped; at `K = 1`, where a short last batch is no window at all.

    ## Options
    - `mode`: `"warn"` leaves the window as it is.
    - `normalization`: `"mean"` declares that each window's mean is meant.
    - `ignore=("ACC105",)` accepts it.

    ## References
    - https://github.com/Lightning-AI/pytorch-lightning/issues/19987
    - https://github.com/Lightning-AI/pytorch-lightning/issues/21808
    - https://github.com/huggingface/transformers/pull/39395
    """

    code = "ACC105"
    corrects = True
    name = "partial-window"
    why = (
        "An incomplete window is divided by the nominal accumulation steps, so its examples count less than all others."
    )
    remedy = "Divide the window by the microbatches it holds, or drop it."


class UnequalMicrobatches(Rule):
    """Units differ between the microbatches of a window: a mean of means.

    ## What it does
    Finds windows whose microbatches are each averaged over their own units (valid tokens, examples) although the
    numbers of units differ.

    ## Why is this bad?
    A unit in a microbatch with 100 tokens weighs 10 times as much as one in a microbatch with 1000. The update then
    depends on how the same examples were split, and no single factor repairs it, since its direction is off too. The
    message gives the spread: the largest weight of a unit over the smallest.

    ## Example
    ```python
    for batch in window:  # padded sequences of different length; targets of -100 are ignored
        logits = model(batch["input_ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())  # a mean over this microbatch's tokens
        (loss / len(window)).backward()
    ```

    ## Use instead
    ```python
    tokens = sum((batch["labels"] != -100).sum() for batch in window)
    for batch in window:
        logits = model(batch["input_ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        (loss / tokens).backward()
    ```

    ## Fix
    Corrected exactly: each microbatch is scaled by its own count, the window divided once by the total.

    ## When it is silent
    When all microbatches have equal counts; when sums are divided once by the window's count; when the mean runs over
    sequences of per-sequence means, whose unit is the sequence; with a constant normalizer
    (`sum / (batch * max_length)`), which weighs every token the same.

    ## Options
    - `units`: what counts as a unit where the graph of the loss cannot tell, for example
      `units=lambda batch: (batch["labels"] != -100).sum()`.
    - `normalization`: `"mean"` declares a mean over all units of the window.
    - `ignore=("ACC106",)` accepts the mean of means.

    ## References
    - https://github.com/huggingface/transformers/issues/34242
    - https://github.com/Lightning-AI/pytorch-lightning/issues/20350
    """

    code = "ACC106"
    corrects = True
    name = "unequal-microbatches"
    why = (
        "A mean of means gives a unit in a short microbatch more weight than a unit in a long one, "
        "so the update depends on how the window was split."
    )
    remedy = "Sum the unit losses over the window and divide once by the window's unit count."


class UnequalRanks(Rule):
    """Units differ between ranks: the plain average over ranks weighs them wrongly.

    ## What it does
    Finds steps in which each rank averages over its own units and the wrapper averages over the ranks, although the
    ranks hold different numbers of units.

    ## Why is this bad?
    A rank with few units gets the same say as one with many: with 10 tokens on one rank and 90 on the other, each
    token of the first weighs 9 times as much. The right combination weights rank `g` by its share of all units; the
    plain average is that only when the shares are equal.

    ## Example
    ```python
    logits = ddp_model(batch["input_ids"])
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())  # a mean over this rank's tokens
    loss.backward()  # DDP: a plain average of the ranks
    ```

    ## Use instead
    ```python
    tokens = (batch["labels"] != -100).sum()
    torch.distributed.all_reduce(tokens)  # tokens on all ranks
    logits = ddp_model(batch["input_ids"])
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    (loss * torch.distributed.get_world_size() / tokens).backward()
    ```

    ## Fix
    Corrected exactly: the counts of all ranks travel in the one small reduction of the optimizer step.

    ## When it is silent
    When all ranks have equal counts; when the sum is divided by the global count; when only ranks that share their
    examples (tensor, context or pipeline parallel) differ, since those are one data-parallel rank.

    ## Options
    - `units`: what counts as a unit where the graph of the loss cannot tell.
    - `normalization`: `"mean"` declares a mean over all units of all ranks.
    - `ignore=("ACC107",)` accepts the plain average.

    ## References
    - https://github.com/huggingface/transformers/issues/34242
    - https://github.com/Lightning-AI/pytorch-lightning/issues/20350
    """

    code = "ACC107"
    corrects = True
    name = "unequal-ranks"
    why = (
        "A plain average over ranks gives a unit on a rank with few units more weight than a unit on a rank with many."
    )
    remedy = "Divide each rank's loss sum by the global unit count and multiply by the number of ranks."


class SumLossAveraged(Rule):
    """A sum loss divided by n or K behind the user's back: neither the sum nor the mean.

    ## What it does
    Finds a loss that is a plain sum over its units (`reduction="sum"`) while the wrapper divides by `n` or the
    framework divides by `K`.

    ## Why is this bad?
    The gradient is the global sum over `n` (or `K`, or `nK`). It still grows with the microbatch, and shrinks as ranks
    are added, so that the learning rate belongs to one layout only. A sum with nothing behind it is consistent; this
    one is not.

    ## Example
    ```python
    class Model(LightningModule):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self(batch[0]), batch[1], reduction="sum")

    trainer = Trainer(accumulate_grad_batches=4, devices=2, strategy="ddp")  # divides the sum by 4 and by 2
    ```

    ## Use instead
    ```python
    class Model(LightningModule):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self(batch[0]), batch[1])  # the mean; choose the learning rate again
    ```
    To keep the sum: `return loss * self.trainer.accumulate_grad_batches * self.trainer.world_size`.

    ## Fix
    Corrected where it is declared: with `normalization="sum"` or `"mean"` the gradient becomes exactly that. Under
    `"auto"` the message gives the factor against the sum, and asks which of the two is meant.

    ## When it is silent
    When nothing divides the sum; when the loss is multiplied by what divides it (`* K * n`); when the gradients are
    multiplied by `n / units` after backward.

    ## Options
    - `normalization`: `"sum"` keeps the sum, `"mean"` makes it a mean over all units of the window.
    - `ignore=("ACC108",)` accepts it.

    ## References
    - https://github.com/pytorch/pytorch/issues/37359
    - https://github.com/rwth-i6/returnn/issues/1379
    """

    code = "ACC108"
    corrects = True
    name = "sum-loss-averaged"
    why = "The loss is a sum, but it is divided afterwards, so the gradient is neither the sum nor the mean."
    remedy = (
        "Divide the loss by its unit count if a mean is meant, "
        "or multiply it by what divides it afterwards if the sum is."
    )


class UnexplainedScale(Rule):
    """The gradient is off by a factor that none of ACC101 to ACC108 explains.

    ## What it does
    Reports a measured gradient scale that differs from 1 and is no combination of `n`, `K`, `m` and the unit counts.

    ## Why is this bad?
    Something multiplies the gradient between the loss and the optimizer. It may be meant (a coefficient), or be a
    leftover; either way the learning rate does not mean what it says. With `n = 4` and `K = 2`, a factor of 8 would be
    named as the product of two known mistakes; a factor of 3 is what this rule is for.

    ## Example
    ```python
    loss.backward()
    for parameter in model.parameters():
        parameter.grad *= 3.0  # left over from an experiment
    optimizer.step()
    ```

    ## Use instead
    ```python
    loss.backward()
    optimizer.step()
    ```

    ## Fix
    Never corrected: what is not understood is reported, with the factor and with what would settle it.

    ## When it is silent
    When the factor is explained by another finding; when a constant sits on the loss itself, which is a coefficient;
    when the scaling is undone before the step, as an fp16 loss scale is.

    ## Options
    - `normalization`: `"sum"` or `"mean"` declares the target the factor is taken against.
    - `verify=True` compares one window with the same examples as one batch, and settles whether the factor is real.
    - `ignore=("ACC109",)` accepts it.

    ## References
    - https://github.com/huggingface/transformers/pull/39674
    - https://github.com/facebookresearch/fairseq/issues/494 (a scaling of gradients that is right)
    """

    code = "ACC109"
    corrects = True
    name = "unexplained-scale"
    why = "No known convention explains this factor, so the learning rate does not mean what it says."
    remedy = (
        "Look for a constant on the loss or on the gradients and remove it, "
        "or silence this rule with ignore=('ACC109',) if it is meant."
    )


class UnknownReduction(Rule):
    """The measured reduction over ranks is neither a sum nor a mean, or compounds over microbatches.

    ## What it does
    Compares the sum of all ranks' local gradients with what stands in `.grad` after the reduction. The ratio should be
    `1` (a sum) or `1/n` (a mean), and the same in every window.

    ## Why is this bad?
    No convention of the loss fits such a reduction. The typical case is a sum that compounds: every microbatch is
    reduced together with what was reduced before, so the first microbatch of a window of `K` counts `n ** (K - 1)`
    times as much as the last. Others are a divide factor of the wrong group (tensor-parallel ranks counted as
    data-parallel ones) and a hook with a wrong constant.

    ## Example
    ```python
    for batch in window:
        (loss_of(model, batch) / len(window)).backward()
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad)  # sums what has been summed already
    optimizer.step()
    ```

    ## Use instead
    ```python
    for batch in window:
        (loss_of(model, batch) / len(window)).backward()
    for parameter in model.parameters():
        torch.distributed.all_reduce(parameter.grad, op=torch.distributed.ReduceOp.AVG)  # once, at the end
    optimizer.step()
    ```

    ## Fix
    Never corrected: a compounded window cannot be undone by one factor.

    ## When it is silent
    For plain sums and means, also through the built-in compression hooks and DeepSpeed's prescale and predivide options
    (their product is a mean); when averaging at every microbatch, which is right, only slow (ACC207).

    ## Options
    - `mode`: `"raise"` stops before the first such step.
    - `rewrite`: `"reduction"` replaces reductions that are understood; this one is left alone.
    - `ignore=("ACC110",)` silences it.

    ## References
    - https://github.com/huggingface/transformers/pull/39674
    - https://github.com/pytorch/pytorch/pull/42399
    """

    code = "ACC110"
    name = "unknown-reduction"
    why = (
        "The ranks' gradients are combined into something that is neither their sum nor their mean, "
        "so no convention of the loss makes the update right."
    )
    remedy = "Reduce once per window, and check the communication hook and the wrapper's divide factor."


class RanksDiverge(Rule):
    """Ranks are about to step with different gradients.

    ## What it does
    Compares, over all ranks and right before the optimizer step, a few gradient elements that a data-parallel wrapper
    must have made equal.

    ## Why is this bad?
    Each rank then trains its own model on its own share of the data, and the checkpoint holds the one of rank 0. The
    loss looks healthy: every copy learns, only from `1/n` of the examples.

    ## Example
    ```python
    def training_step(self, batch, batch_idx):  # manual optimization, strategy="ddp"
        loss = F.cross_entropy(self(batch[0]), batch[1])
        loss.backward()  # DDP was not told to reduce
        self.optimizers().step()
        self.optimizers().zero_grad()
    ```

    ## Use instead
    ```python
    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.manual_backward(loss)  # prepares the reduction
        self.optimizers().step()
        self.optimizers().zero_grad()
    ```

    ## Fix
    Never corrected: parameters that have parted are not put together again by a factor.

    ## When it is silent
    When gradients differ inside a window under `no_sync` and are reduced before the step; when sharded gradients differ
    because each rank holds another shard; when a parameter is declared local to its rank.

    ## Options
    - `mode`: `"raise"` stops before the ranks part.
    - `ignore=("ACC111",)` silences it, for training that means to let ranks differ.

    ## References
    - https://github.com/Lightning-AI/pytorch-lightning/issues/9237
    - https://github.com/huggingface/diffusers/pull/308
    """

    code = "ACC111"
    name = "ranks-diverge"
    why = "Ranks that step with different gradients train different models, and only one of them is saved."
    remedy = "Run backward through the framework, and step only after a backward that reduced the gradients."
