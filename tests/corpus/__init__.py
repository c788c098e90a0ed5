"""The corpus: wrong and right training loops from public reports, each run for real; see :mod:`corpus.table`."""
