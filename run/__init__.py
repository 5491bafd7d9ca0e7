"""Sessions, requests, all options, the terminal, ranks. Without it one prompt is answered."""

# functions that only one of several ranks calls (run/rank.py)
OF_RANKS = (
    "check",
    "check_same_on_all_ranks",
    "init_ranks",
    "refuse_torchrun",
    "report_from_rank_0",
    "smallest",
)
OF_SHARES = ("load_model", "pick_tokens", "split_lm_head")
NEEDS = ("files",)
ADDS = {
    "operators": {"machine": "run.operators"},
    "program": {"generate": "run.main:main", "quantize": "run.quantize:main"},
    "ranks": {
        **{name: f"run.ranks:{name}" for name in OF_RANKS},
        **{name: f"run.tp:{name}" for name in OF_SHARES},
    },
    "library": {
        "load": "run.load:load",
        "generate": "run.generate:generate",
        "stream": "run.generate:stream",
    },
}
