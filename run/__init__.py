"""Sessions, requests, all options, the terminal, ranks. Without it generate.py answers one prompt."""

NEEDS = ("files",)
ADDS = {}
