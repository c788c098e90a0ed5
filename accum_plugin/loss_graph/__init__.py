"""How is this loss normalized? Read from its autograd graph, at every microbatch, in a few microseconds.

The walk starts at ``loss.grad_fn`` and has four rooms:

* ``_walk``: the scalar path, from the loss down to its reductions (arithmetic, casts, wrappers' identities);
* ``_reductions``: what each reduction divides by and counts;
* ``_inner``: what lies right below a reduction: masks, weights, constants, means of means;
* ``_leaves``: does a term depend on parameters only, does it compare examples with each other?

Nothing is guessed: what is not in the tables makes the reading ``unreadable``, with the reason in words.
"""

from accum_plugin.loss_graph._read import read_loss
from accum_plugin.loss_graph._values import LossReading, Number, Scale, Term, same_scales

__all__ = ["LossReading", "Number", "Scale", "Term", "read_loss", "same_scales"]
