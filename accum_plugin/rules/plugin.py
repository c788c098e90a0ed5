"""ACC901 and ACC902: what the plugin says about itself.

Each docstring is the rule's published page.
"""

from __future__ import annotations

from accum_plugin.rules.base import Rule


class LossUnreadable(Rule):
    """How the loss is normalized could not be read; the message says what is checked instead.

    ## What it does
    Reports, once, that neither the autograd graph of the loss nor a probe of its value told what the loss divides by:
    a compiled model, a fused kernel, a custom `autograd.Function`, a batch that cannot be split.

    ## Why is this bad?
    Half of the account is missing. The reduction over ranks is still measured on the gradients, and the configuration
    is still read, but a mean of means or a sum loss goes unnoticed.

    ## Example
    ```python
    class FusedLoss(torch.autograd.Function):  # returns a sum or a mean? its graph does not tell
        @staticmethod
        def forward(ctx, logits, targets): ...

    callback = AccumulationCallback()
    ```

    ## Use instead
    ```python
    callback = AccumulationCallback(
        normalization="mean",
        units=lambda batch: (batch["labels"] != -100).sum(),
    )
    ```

    ## Fix
    Nothing is guessed: without a declaration only what was measured is corrected.

    ## When it is silent
    When the graph can be read, which covers the losses of `torch.nn.functional` and hand-written means, sums and masked
    means; when `normalization` and `units` declare what the loss is.

    ## Options
    - `normalization`: what the window's gradient is meant to be.
    - `units`: units in a microbatch.
    - `verify=True` checks the scale of the first window without reading the loss at all.
    - `ignore=("ACC901",)` silences it.

    ## References
    - https://docs.pytorch.org/docs/stable/notes/extending.html#extending-torch-autograd
    - https://docs.pytorch.org/docs/stable/notes/autograd.html#saved-tensors
    """

    code = "ACC901"
    name = "loss-unreadable"
    why = "Without it, part of the account rests on the measured gradients and the configuration alone."
    remedy = "Declare it with normalization='mean' or 'sum', and units= where microbatches differ in size."


class PluginDisabled(Rule):
    """An internal error switched the plugin off; training goes on.

    ## What it does
    Reports, once, that the plugin met an error of its own, took back everything it had installed, and stays off for the
    rest of the run.

    ## Why is this bad?
    For the run it is not: it goes on as if the plugin had never been there. But from that step on nothing is checked
    and nothing corrected, so a factor that was put right before is back.

    ## Example
    ```python
    callback = AccumulationCallback(units=lambda batch: batch["num_tokens"])  # KeyError: there is no such key
    ```

    ## Use instead
    ```python
    callback = AccumulationCallback(units=lambda batch: (batch["labels"] != -100).sum())
    ```

    ## Fix
    Nothing to correct. If training must not go on uncorrected, settle the findings in the code itself.

    ## When it is silent
    When the error is raised by the training code, which passes through untouched; when `mode="raise"` stops the run for
    a finding.

    ## Options
    - `mode`: in every mode an internal error only switches the plugin off.
    - `ignore=("ACC902",)` hides the message, not the error.

    ## References
    - https://lightning.ai/docs/pytorch/stable/extensions/callbacks.html (where an error of a callback would stop a run)
    """

    code = "ACC902"
    name = "plugin-disabled"
    why = "From here on nothing is checked or corrected; training itself goes on unchanged."
    remedy = "Report the error with its traceback from the log; if units= raised it, correct that function."
