"""Sessions, requests, all options, the terminal, ranks. Without it one prompt is answered."""

NEEDS = ("files",)
ADDS = {
    "program": {"generate": "run.start:main"},
}
