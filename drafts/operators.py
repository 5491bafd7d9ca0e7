"""Functions that a backend may have for lookups (ngram_draft.py), which else run their own code."""

from __future__ import annotations

add_chains = ngram_draft = ngram_match = None
