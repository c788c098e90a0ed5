"""The table: one row for each pattern. To add a case, add a loop and a row.

Loops that need FSDP, DeepSpeed or tensor parallelism to run are not in it yet: those wrappers are not supported so far.
"""

from __future__ import annotations

from corpus import accelerate_right, accelerate_wrong, lightning_right, lightning_wrong, trainer
from corpus.case import Case

A, T, L = "Accelerate", "Trainer", "Lightning"

MUST_BE_FOUND = (
    Case(
        "A1", "loss / K, then accelerator.backward of an Accelerator built with K", "accelerate #3533", A,
        accelerate_wrong.divided_twice, {"ACC103": "1/K"}, fixed=True, n=2, K=3,
    ),
    Case(
        "A2", "accumulate() used, K never given to the Accelerator, loss divided by K", "diffusers PR #308", A,
        accelerate_wrong.steps_never_given, {"ACC202": "1/K"}, K=4,
    ),
    Case(
        "A2b", "accumulate() used, the optimizer never prepared: ranks part ways", "ms-swift #2527", A,
        accelerate_wrong.optimizer_never_prepared, {"ACC202": "1/K", "ACC111": None}, n=2, K=3,
    ),
    Case(
        "A3", "zero_grad() first thing in the accumulate block", "LongCat-Image #46", A,
        accelerate_wrong.cleared_first, {"ACC201": "1/K"}, n=2, K=3,
    ),
    Case(
        "A4", "loss.backward() inside accumulate", "docstring of Accelerator.accumulate", A,
        accelerate_wrong.raw_backward, {"ACC208": None, "ACC104": "K"}, fixed=True, K=3,
    ),
    Case(
        "A5", "inner loop over slices of a batch: every slice of the loader's last batch steps", "accelerate #1847", A,
        accelerate_wrong.sliced_last_batch, {"ACC202": "1/K"}, K=4, says=("sync_with_dataloader",), also=("ACC105",),
    ),
    Case(
        "A6", "clip_grad_norm_ at every microbatch", "accelerate #641, diffusers PR #721", A,
        accelerate_wrong.clipped_every_time, {"ACC204": None}, K=4, says=("2, 3, 3, 3", "8"),
    ),
    Case(
        "A7", "sum loss over the global count, then averaged by the wrapper", "torchtune PR #2172", A,
        accelerate_wrong.sum_over_global_count, {"ACC101": "1/n"}, fixed=True, n=2, K=3,
    ),
    Case(
        "A8", "local mean times the number of processes, averaged", "tevatron #143", A,
        accelerate_wrong.times_num_processes, {"ACC102": "n"}, fixed=True, n=2, K=3,
    ),
    Case(
        "A9", "5 microbatches, K = 4: the last window holds one", "measured", A,
        accelerate_wrong.incomplete_last_window, {"ACC105": "m/K"}, fixed=True, K=4, m=1,
    ),
    Case(
        "A10", "local token means over ragged microbatches", "transformers #34242", A,
        accelerate_wrong.ragged_tokens, {"ACC106": None, "ACC107": None}, fixed=True, n=2, K=3, says=("times as much",),
    ),
    Case(
        "A11", "loss value all-reduced without autograd, divided by the global count", "lightly #1977", A,
        accelerate_wrong.value_reduced_without_autograd, {"ACC101": "1/n"}, fixed=True, n=2, K=3,
    ),
    Case(
        "A12", "unprepared scheduler stepped at every microbatch", "starVLA PR #210", A,
        accelerate_wrong.scheduler_never_prepared, {"ACC203": None}, K=4, says=("4 times too fast",),
    ),
    Case(
        "A13", "scheduler horizon counted in microbatches", "accelerate #2773", A,
        accelerate_wrong.horizon_in_microbatches, {"ACC209": None}, K=3, says=("12 long", "Set it to 4"),
    ),
    Case(
        "A13b", "scheduler horizon counted in per-process steps", "accelerate #2773", A,
        accelerate_wrong.horizon_in_steps_of_one_process, {"ACC209": None}, n=2, K=3, says=("4 long", "Set it to 8"),
    ),
    Case(
        "A14", "even_batches pads: 5 examples, 2 ranks, batch 2 gives 3 repeats", "accelerate #2316", A,
        accelerate_wrong.padded_last_batch, {"ACC402": None}, n=2, K=2, says=("3 repeats",), fact=True,
        holds=accelerate_wrong.five_are_distinct,
    ),
    Case(
        "A15", "DeepSpeed configuration and Accelerator disagree about K", "PickScore #18", A,
        accelerate_wrong.deepspeed_config_disagrees, {"ACC202": None}, K=4,
        says=("gradient_accumulation_steps=8", "gradient_accumulation_steps=4"),
    ),
    # the models of the Trainer rows compute parts in float32, whatever the type of their weights
    Case(
        "T1", "compute_loss overridden, returns a local mean", "Soup #720", T,
        trainer.local_mean, {"ACC104": "K"}, fixed=True, exact=1e-6, n=2, K=3,
    ),
    Case(
        "T2", "compute_loss_func that ignores num_items_in_batch", "transformers PR #36426", T,
        trainer.count_ignored, {"ACC104": "K", "ACC102": "n"}, fixed=True, exact=1e-6, n=2, K=3,
    ),
    Case(
        "T2b", "the same at K = 1", "transformers PR #36426", T,
        trainer.count_ignored, {"ACC102": "n"}, fixed=True, exact=1e-6, n=2, K=1,
    ),
    Case(
        "T3", "compute_loss overridden, returns sum / num_items_in_batch", "measured", T,
        trainer.global_mean, {"ACC101": "1/n"}, fixed=True, exact=1e-6, n=2, K=3,
    ),
    Case(
        "L1", "automatic optimization, training_step returns loss / K", "rf-detr #1503", L,
        lightning_wrong.divided_twice, {"ACC103": "1/K"}, fixed=True, n=2, K=3,
    ),
    Case(
        "L2", "manual optimization, manual_backward(loss), step every K", "lightning #12811, #17957", L,
        lightning_wrong.never_divided, {"ACC104": "K"}, fixed=True, K=3,
    ),
    Case(
        "L3", "10 batches, K = 4", "lightning #19987", L,
        lightning_wrong.last_window_incomplete, {"ACC105": "m/K"}, fixed=True, K=4, m=2,
    ),
    Case(
        "L4", "an epoch shorter than K", "lightning #21808", L,
        lightning_wrong.epoch_shorter_than_window, {"ACC105": "m/K"}, fixed=True, K=7, m=3,
    ),
    Case(
        "L5", "padded sequences, token mean, K > 1", "lightning #20350", L,
        lightning_wrong.padded_sequences, {"ACC106": None, "ACC107": None}, fixed=True, n=2, K=3,
        says=("times as much",),
    ),
    Case(
        "L6", "manual optimization under DDP with loss.backward()", "lightning #9237", L,
        lightning_wrong.raw_backward_under_ddp, {"ACC111": None}, n=2, K=1, also=("ACC208",),
    ),
    Case(
        "L7", "clip_grad_norm_ inside training_step", "nano-world-model PR #22", L,
        lightning_wrong.clipped_in_training_step, {"ACC204": None}, K=3,
    ),
    Case(
        "L8", "fp16: clipped before unscaling", "lightning #9694", L,
        lightning_wrong.clipped_before_unscaling, {"ACC206": None}, K=1, says=("off by a factor of 1024",),
    ),
    Case(
        "L9", 'schedule sized in optimizer steps, interval left at "epoch"', "lightning #5631", L,
        lightning_wrong.schedule_per_epoch, {"ACC209": None}, K=4, says=("6 long", "2 times in all"),
    ),
    Case(
        "L10", "communication hook that sums and does not divide; local means", "pytorch PR #42399", L,
        lightning_wrong.sum_hook_on_local_means, {"ACC102": "n"}, fixed=True, n=2, K=3,
    ),
    Case(
        "L11", "sum loss under DDP", "pytorch #37359", L,
        lightning_wrong.plain_sum, {"ACC108": "1/n"}, n=2, K=1,
    ),
    Case(
        "L12", "sum loss, automatic optimization with K: 9 for 36", "returnn #1379", L,
        lightning_wrong.plain_sum, {"ACC108": "1/K"}, K=4,
    ),
    Case(
        "L13", "two optimizers, one's backward leaves gradients in the other", "lightning #591", L,
        lightning_wrong.gradients_left_in_the_other, {"ACC201": None}, K=1,
    ),
    Case(
        "L14", "static_graph=True with K > 1", "accelerate #3679", L,
        lightning_wrong.static_graph, {"ACC110": None}, n=2, K=3, says=("static_graph",),
    ),
    Case(
        "L15", "one microbatch of the window returns None", "measured", L,
        lightning_wrong.no_loss_for_one_microbatch, {"ACC105": "m/K"}, fixed=True, K=4, m=3,
    ),
    Case(
        "L16", "fp16 overflow skips the step, the scheduler moves on", "lightning #18828", L,
        lightning_wrong.overflow_skips_the_step, {"ACC203": None}, K=3, says=("skipped",), fact=True,
        holds=lightning_wrong.two_steps_of_three,
    ),
    Case(
        "L17", "DistributedSampler pads 5 examples to 6", "measured", L,
        lightning_wrong.padded_sampler, {"ACC402": None}, n=2, K=3, says=("6 examples of 5", "1 repeat"), fact=True,
        holds=accelerate_wrong.five_are_distinct,
    ),
)

MUST_STAY_SILENT = (
    Case(
        "S1", "the documented recipe: sum loss times K * n / N, own no_sync", "accelerate docs", A,
        accelerate_right.documented_recipe, n=2, K=3,
    ),
    Case(
        "S2", "stock Trainer on a causal language model, with an incomplete last window", "transformers PR #39395", T,
        trainer.stock_language_model, n=2, K=3, m=1,
    ),
    Case(
        "S3", "prepared step(), scheduler.step(), zero_grad() unguarded inside accumulate", "diffusers #10855", A,
        accelerate_right.prepared_and_unguarded, K=4,
    ),
    Case(
        "S4", "loss / K by hand, an Accelerator with one step, an own modulo", "accelerate docs", A,
        accelerate_right.own_modulo, K=3,
    ),
    Case(
        "S5", "gradient_accumulation_steps == 1 in the Accelerator of a Trainer that accumulates", "transformers", T,
        trainer.stock_language_model, K=4, m=4, holds=trainer.accelerator_has_one_step,
    ),
    Case(
        "S6", "constant normalizer: sum / (batch * max_length)", "trl PR #3256", L,
        lightning_right.constant_normalizer, n=2, K=3,
    ),
    Case("S7", "0.5 * mse with K = 2", "diffusers", L, lightning_right.half_mse, K=2),
    Case("S7b", "prior-preservation loss", "diffusers", L, lightning_right.prior_preservation, K=2),
    Case("S7c", "min-SNR weights", "diffusers", L, lightning_right.min_snr, K=2),
    Case("S8", "label smoothing in cross_entropy", "-", L, lightning_right.label_smoothing, n=2, K=3),
    Case(
        "S9", "several terms: mean + 0.1 * sum / len + an L2 penalty", "measured", L,
        lightning_right.several_terms, n=2, K=3,
    ),
    Case(
        "S10", "gathered contrastive loss times world size, undoing the average", "tevatron #30", A,
        accelerate_right.gathered_contrastive, n=2, K=1,
    ),
    Case(
        "S11", "sum loss, no division, gradients multiplied by n / units after backward", "fairseq #494", A,
        accelerate_right.gradients_multiplied_by_hand, n=2, K=3,
    ),
    Case(
        "S12", "own loop: sum over the window's tokens on all ranks, ranks added up", "torchtitan PR #2206", L,
        lightning_right.summed_over_the_windows_tokens, n=2, K=3,
    ),
    Case(
        "S13", "manual optimization that divides by K itself", "lightning docs", L,
        lightning_right.manual_and_divided, K=3,
    ),
    Case(
        "S14", "loss / K, plain DDP, require_backward_grad_sync toggled", "nanoGPT", A,
        accelerate_right.toggled_by_hand, n=2, K=3,
    ),
    Case(
        "S15", "GAN: two optimizers, different cadence, toggled", "lightning", L,
        lightning_right.toggled_adversaries, K=1,
    ),
    Case(
        "S16", "sum hook with a globally normalized loss", "measured", L,
        lightning_right.summed_and_globally_normalized, n=2, K=3,
    ),
    Case(
        "S17", "synchronizing at every microbatch with loss / K", "measured", L,
        lightning_right.synchronized_every_time, n=2, K=3,
    ),
    Case("S18", "built-in fp16 compression hook", "measured", L, lightning_right.compressed_to_fp16, n=2, K=3),
    Case(
        "S19", 'outputs["loss"] is loss / K', "lightning #13243", L,
        lightning_right.loss_in_the_outputs, K=4, holds=lightning_right.outputs_hold_the_divided_loss,
    ),
    Case(
        "S19b", "global_step adds up over optimizers", "lightning #17958", L,
        lightning_right.global_step_over_optimizers, K=1, holds=lightning_right.steps_are_each_optimizers_own,
    ),
    Case(
        "S20", "a logged gradient norm above the clip value", "lightning #18669", L,
        lightning_right.norm_logged_before_clipping, K=3, holds=lightning_right.norms_are_above_the_clip,
    ),
    Case(
        "S21", "prepared scheduler moves n times per step, with the horizon sized for it", "accelerate #2773", A,
        accelerate_right.scheduler_counts_ranks, n=2, K=3,
    ),
    Case(
        "S22", "stock Trainer with a head that forwards its count (ViT), K > 1, n > 1", "measured", T,
        trainer.stock_image_classifier, n=2, K=3,
    ),
    Case("S23", "a short last batch at K = 1, one process", "keras #20241", L, lightning_right.short_last_batch, K=1),
)

CASES = (*MUST_BE_FOUND, *MUST_STAY_SILENT)
