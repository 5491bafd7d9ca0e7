"""Drafters beside EAGLE, trees by the text, grammars, penalties. Without it EAGLE alone drafts."""

NEEDS = ("run",)
ADDS = {
    "operators": {"lookups": "drafts.operators"},
}
