"""Drafters beside EAGLE's, trees that follow the text, grammars, penalties. Without it EAGLE drafts."""

NEEDS = ("run",)
ADDS = {}
