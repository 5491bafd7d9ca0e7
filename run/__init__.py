"""Sessions, requests, all options, the terminal, ranks. Without it one prompt is answered."""

NEEDS = ("files",)
ADDS = {
    "operators": {"machine": "run.operators"},
    "program": {"generate": "run.main:main", "quantize": "run.quantize:main"},
    "library": {
        "load": "run.load:load",
        "generate": "run.generate:generate",
        "stream": "run.generate:stream",
    },
}
