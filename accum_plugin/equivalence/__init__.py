"""Exactly right or not, decided without the ledger: one window against the same examples as one batch on one process.

* ``check``: the check itself, and what keeps a window's inputs for it;
* ``reference``: the gradient of one batch on one process; ``comparison``: by how much the real one deviates;
* ``gathering``: every rank's microbatches and verdicts; ``diagnose_split``: where what is no factor comes from;
* ``probe``: mean-like, sum-like or coupled, told from a batch and its halves; ``batches``: cutting and joining batches;
* ``controlled``, ``untouched``: random layers off, compiled code opened, and everything as it was afterwards.
"""

from accum_plugin.equivalence.check import EquivalenceProbe, EquivalenceReport, check_equivalence

__all__ = ["EquivalenceProbe", "EquivalenceReport", "check_equivalence"]
