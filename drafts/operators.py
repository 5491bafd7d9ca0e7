"""Functions that a backend may have for drafters of this folder, which else run their own code.

`keep_rows` serves deferred.py, the others lookups (ngram_draft.py).
"""

from __future__ import annotations

add_chains = keep_rows = ngram_draft = ngram_match = None
