"""Drafters beside EAGLE, trees by the text, grammars, penalties. Without it EAGLE alone drafts."""

# functions that a backend may have for drafters of this folder, which else run their own code
OF_BACKENDS = {
    name: f"drafts.operators:{name}" for name in ("add_chains", "ngram_draft", "ngram_match")
}
NEEDS = ("files", "run")
ADDS = {
    "drafters": {"drafts": "drafts.methods"},
    "acceptance": {"residual": "drafts.residual:ResidualCycle"},
    "extension": {
        "grammar": "drafts.grammar",
        "guided cycle": "drafts.guided_draft:GuidedCycle",
        "logprobs": "drafts.logprobs:Logprobs",
        "shaping": "drafts.shaping:Shaping",
        "shaped cycle": "drafts.shaping:ShapedCycle",
        "residual": "drafts.residual",
        "auto": "drafts.ngram_draft",
        "random model": "drafts.random_model:target_source",
        "parallel eagle": "drafts.parallel_eagle:ParallelEagleDrafter",
    },
    "operators": {"cut_shaped": "drafts.cuts:cut_shaped", **OF_BACKENDS},
}
