"""Drafters beside EAGLE, trees by the text, grammars, penalties. Without it EAGLE alone drafts."""

NEEDS = ("files", "run")
ADDS = {
    "drafters": {"drafts": "drafts.methods"},
    "extension": {
        "grammar": "drafts.grammar",
        "shaping": "drafts.shaping",
        "residual": "drafts.residual",
        "resting": "drafts.deferred:RestingDrafter",
        "auto": "drafts.auto_trees",
        "stand_in": "drafts.stand_in",
        "parallel eagle": "drafts.parallel_eagle:ParallelEagleDrafter",
    },
    "operators": {"lookups": "drafts.operators", "cuts": "drafts.cuts"},
}
