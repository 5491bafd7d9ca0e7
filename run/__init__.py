"""Sessions, requests, all options, the terminal, ranks. Without it one prompt is answered."""

# functions that only one of several ranks calls (files/rank.py)
OF_RANKS = (
    "check",
    "check_same_on_all_ranks",
    "init_ranks",
    "refuse_torchrun",
    "report_from_rank_0",
    "smallest",
)
OF_SHARES = ("load_model", "split_lm_head")
OPERATORS = ("device_time", "with_times")
NEEDS = ("files",)
ADDS = {
    "operators": {name: f"run.clock:{name}" for name in OPERATORS},
    "program": {"generate": "run.start:main", "quantize": "run.quantize:main"},
    "command": {
        "decode": "run.generate:main",
        "chat": "run.repl:chat",
        "keys": "run.keyboard:Keyboard",
        "printer": "run.terminal:printer",
    },
    "watch": {"published tau": "run.published:Watched"},
    "trees": {
        "of a file": "run.tree_paths:read_tree",
        "of Medusa": "run.tree_paths:MEDUSA_PATHS",
    },
    "ranks": {
        **{name: f"run.ranks:{name}" for name in OF_RANKS},
        **{name: f"run.tp:{name}" for name in OF_SHARES},
    },
    "library": {
        "load": "run.load:load",
        "generate": "run.library:generate",
        "stream": "run.library:stream",
        "astream": "run.library:astream",
    },
}
