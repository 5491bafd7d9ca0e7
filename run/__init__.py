"""Sessions, requests, all options, the terminal, ranks. Without it one prompt is answered."""

NEEDS = ("files",)
ADDS = {
    "program": {"generate": "run.start:main"},
    "library": {
        "load": "run.load:load",
        "generate": "run.generate:generate",
        "stream": "run.generate:stream",
    },
}
