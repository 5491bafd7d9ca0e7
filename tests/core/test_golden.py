"""The official EAGLE code's recorded runs (golden/README.md), reproduced by whole decoding sessions in fp32.

Greedy runs must agree by themselves. In sampled runs the noise is replaced by noise that makes every draw come out
as recorded: drafts, acceptance and residual distributions are then ours and must agree with the record.
`differences` names what disagrees; the last tests make sure that it can.
"""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch

import eagle_draft
import model
import sampling
from draft_tree import EAGLE1_PATHS, MAX_NODES, DynamicTree, StaticTree
from drafters import RootOnly
from drafts import residual
from drafts.noise import ACCEPT, DRAFT
from eagle_draft import EagleDrafter, load_head
from files.checkpoint import WeightFiles
from helpers import (
    GOLDEN,
    decode,
    engine_for,
    golden_case,
    golden_floats,
    golden_head,
    golden_run,
    golden_target,
    record,
    slow,
    with_children,
)

GREEDY = [
    "eagle2_mha_k4_d3_t12", "eagle1_static26_mha", "eagle1_chain5_mha_alpha", "eagle3_gqa_k8_d4_t32",
]  # fmt: skip
SAMPLED = ["eagle2_mha_k4_d3_t12_temp1", "eagle1_static26_mha_temp1"]
MIXTRAL = "eagle2_mixtral_k4_d3_t12"
RUNS = pytest.mark.parametrize("run", [0, *slow([1, 2])])  # other prompts
TOLERANCE = 1e-4  # fp32 against fp32; typical differences are 3e-6


# ------------------------------------------------------------------------------------------- replay


def drafter_of(case, head=None):
    """The drafter that the official settings mean."""
    target = golden_target(case["target"])
    head = head or golden_head(case["head"], target)
    if case["algorithm"] != "EAGLE-1":
        official = case["official_args"]  # its depth counts the passes after the first level
        shape = DynamicTree(official["depth"] + 1, official["top_k"], official["total_token"])
    else:
        shape = StaticTree.chain(5) if "chain" in case["case"] else StaticTree(EAGLE1_PATHS)
    children = "sampled" if case["algorithm"] == "EAGLE-1" else "topk"
    return with_children(EagleDrafter(head, target, shape, sharpness=1.0), children)


def replay(case, run, monkeypatch, drafter=None):
    """Decode as many tokens as the official run did. Returns: the session."""
    if case["temperature"]:
        force(monkeypatch, run)
    # the first root, then accepted and bonus
    tokens = 1 + sum(length + 1 for length in run["accept_lengths"])
    target, drafter = golden_target(case["target"]), drafter or drafter_of(case)
    options = {"temperature": case["temperature"], "max_new_tokens": tokens, "ignore_eos": True}
    if case["temperature"]:
        options["accept"] = "residual"
    engine = engine_for(target, drafter, **options)
    return decode(engine, run["prompt"])


def force(monkeypatch, run):
    """Replace the noise, so that roots and sampled children come out as recorded, and replay the uniforms."""
    cycles, draw = {}, 1  # the first root was draw 0
    for cycle in run["cycles"]:
        cycles[draw] = cycle
        draw += cycle["accept_length"] + 1

    def gumbel(key, first, rows, vocab, domain=sampling.CHOICE, backend=None):
        noise, first = torch.zeros(len(first), rows, vocab), int(first[0])
        if domain == DRAFT:
            draw, begin = divmod(first, MAX_NODES)
            sampled = cycles[draw]["sampled_topk_tokens"][begin : begin + rows]
            for row, tokens in enumerate(sampled):
                noise[:, row, tokens] = 1e4 * torch.arange(len(tokens), 0, -1)
        else:
            token = cycles[first]["next_root_token"] if first else run["first_root_token"]
            noise[:, :, token] = 1e4
        return noise

    def uniforms(key, draws, count, domain):
        assert domain == ACCEPT
        return padded(cycles[int(draws[0, 0])]["uniform_draws"], count)[:, None]

    monkeypatch.setattr(sampling, "gumbel", gumbel)
    monkeypatch.setattr("drafts.residual.uniforms", uniforms)


def padded(uniforms, count):
    """[1, count]; NaN behind the recorded ones, so that drawing too many is noticed."""
    return torch.tensor([uniforms + [float("nan")] * (count - len(uniforms))])


def differences(session, case, run):
    """Each difference between the trace of a session and the record, as `cycle: field`."""
    tree = case.get("static_tree", {})
    found = [] if len(session.trace) == len(run["cycles"]) else ["number of cycles"]
    for number, (ours, cycle) in enumerate(zip(session.trace, run["cycles"])):
        theirs = {
            "pos": cycle["input_len"],
            "root": cycle["root_token"],
            "draft_tokens": cycle["draft_tokens"][1:],
            "parents": tree.get("parents", cycle.get("parents"))[1:],
            "depths": tree.get("tree_position_ids", cycle.get("tree_position_ids"))[1:],
            "accept_length": cycle["accept_length"],
            "path": cycle["select_indices_in_tree"][1:],
            "emitted": cycle["accepted_tokens"][1:] + [cycle["next_root_token"]],
        }
        found += [f"{number}: {field}" for field, value in theirs.items() if ours[field] != value]
    if session.history[0] != run["final_sequence"] + [run["cycles"][-1]["next_root_token"]]:
        found.append("tokens")
    return found


def recorders(monkeypatch):
    """Record what the target and the head compute."""
    return SimpleNamespace(
        target=record(monkeypatch, model.Transformer, "forward"),
        logits=record(monkeypatch, model.Transformer, "logits"),
        head=record(monkeypatch, eagle_draft.EagleHead, "forward"),
        fuse=record(monkeypatch, eagle_draft.Eagle3Head, "project"),
    )


def largest_error(calls, case, run):
    """The largest difference between recorded calls of the first run and the official floats.

    The calls of a session in order: the target and the head on the prompt (one chunk); then per cycle the head on
    the levels of the tree, the target on the tree, and the head on the confirmed rows with padding behind.
    """
    floats, errors = golden_floats(case["case"]), {}
    last = (
        case["algorithm"] == "EAGLE-3" and golden_target(case["target"]).config.dim or 0
    )  # columns from here on are recorded

    def compare(name, ours):
        errors[name] = (ours - floats[name]).abs().max()

    compare("prefill.features", calls.target[0].result[0, :, last:])
    compare("prefill.last_logits", calls.logits[0].result[0, 0])
    passes, rows = iter(calls.head), len(run["prompt"])
    for c in range(2):
        for s in range(len(run["cycles"][c]["draft_forward_calls"])):
            call = next(passes)
            assert call.result.shape[1] >= floats[f"draft{c}.step{s}.out_hidden"].shape[0]
            rows = rows if s == 0 else call.result.shape[1]
            given = calls.fuse[c].args[1][..., last:] if last and s == 0 else call.args[2]
            compare(f"draft{c}.step{s}.in_hidden", given[0, :rows])
            compare(f"draft{c}.step{s}.out_hidden", call.result[0, :rows])
        compare(f"verify{c}.features", calls.target[c + 1].result[0, :, last:])
        compare(f"verify{c}.logits", calls.logits[c + 1].result[0])
        rows = run["cycles"][c]["accept_length"] + 1
    assert set(errors) == {
        n for n in floats if not n.startswith("cycle")
    }  # nothing recorded is left unchecked
    return float(max(errors.values()))


# -------------------------------------------------------------------------------------------- tests


# the other greedy runs have the same targets, and prompts whose greedy sequences test_cycles compares
@pytest.mark.parametrize(
    "name, run",
    [(GREEDY[0], 0), (GREEDY[3], 0), (MIXTRAL, 0)]
    + [(name, run) for name in SAMPLED for run in range(3)],
)
def test_vanilla(name, run):
    case = golden_case(name)
    expected, prompt = (case["runs"][run][key] for key in ("vanilla_greedy_sequence", "prompt"))
    target = golden_target(case["target"])
    engine = engine_for(
        target, RootOnly(), max_new_tokens=len(expected) - len(prompt), ignore_eos=True
    )
    session = decode(engine, prompt)
    assert session.history[0] == expected
    assert set(session.stats.accept_lengths) == {0}


@RUNS
@pytest.mark.parametrize("name", [*GREEDY, *SAMPLED, MIXTRAL])
def test_cycles(name, run, monkeypatch):
    case = golden_case(name)
    recorded = case["runs"][run]
    logits = record(monkeypatch, model.Transformer, "logits")
    session = replay(case, recorded, monkeypatch)
    assert differences(session, case, recorded) == []
    assert session.stats.accept_lengths == recorded["accept_lengths"]
    for call, cycle in zip(logits[1:], recorded["cycles"]):  # [0] is the prompt's
        assert call.result[0].argmax(-1).tolist() == cycle["target_argmax_per_node"]
    if not case["temperature"]:
        assert session.history[0] == recorded["vanilla_greedy_sequence"][:-1]


@pytest.mark.parametrize("name", [*GREEDY, *SAMPLED, MIXTRAL])
def test_floats(name, monkeypatch):
    case = golden_case(name)
    calls = recorders(monkeypatch)
    replay(case, case["runs"][0], monkeypatch)
    assert largest_error(calls, case, case["runs"][0]) < TOLERANCE


@RUNS
@pytest.mark.parametrize("name", SAMPLED)
def test_residual_distributions(name, run, monkeypatch):
    """Where the walk ended, what is left of p, and q, in whole sampled runs."""
    case = golden_case(name)
    recorded = case["runs"][run]
    calls = record(monkeypatch, residual, "residual_accept")
    replay(case, recorded, monkeypatch)
    assert len(calls) == len(recorded["cycles"])
    for number, (call, cycle) in enumerate(zip(calls, recorded["cycles"])):
        assert call.result.node.item() == cycle["select_indices_in_tree"][-1]
        assert (call.result.p[0] - torch.tensor(cycle["sample_p"])).abs().max() < TOLERANCE
        if case["algorithm"] == "EAGLE-2":
            assert call.args[0].extra is None
            continue
        tree = call.args[0]
        q = tree.extra[0, tree.ran_index[0, inner_nodes(case)]]  # [11, V]
        if run == 0 and number < 6:
            assert (q - proposals(case, number)).abs().max() < TOLERANCE
        drawn = q.gather(1, torch.tensor(cycle["sampled_topk_tokens"])).double()  # [11, 10]
        left = 1 - (drawn.cumsum(1) - drawn)
        conditional = torch.tensor(cycle["sampled_topk_condprobs"], dtype=torch.double)
        # the official quotient loses digits as the mass that is left shrinks
        assert (((drawn / left).clamp(0, 1) - conditional).abs() * left).max() < TOLERANCE


def inner_nodes(case):
    return sorted(set(case["static_tree"]["parents"][1:]))


def proposals(case, cycle):
    """Recorded proposal distributions of the expanded nodes, [11, V]."""
    floats = golden_floats(case["case"])
    return torch.cat([floats[f"cycle{cycle}.op{level}"] for level in range(5)])


def test_part_of_a_static_tree():
    """A node's token follows from its rank path, whatever else the tree holds."""
    widths = (3, 3, 2, 1)  # ranks per level of the whole tree: 3 + 9 + 18 + 18 nodes
    whole = [p for depth in range(1, 5) for p in itertools.product(*map(range, widths[:depth]))]
    # of the root's children only the second has grandchildren: official code misplaces such trees
    part = [(0,), (1,), (2,), (1, 1), (2, 0), (1, 1, 0), (1, 1, 1), (1, 1, 1, 0)]
    drafted = []
    for tree in (StaticTree(tuple(whole)), StaticTree(tuple(part))):
        drafter = EagleDrafter(golden_head(), golden_target(), tree)
        prompt = golden_case(GREEDY[1])["runs"][0]["prompt"]
        session = golden_run(drafter, prompt, max_new_tokens=3)
        paths = sorted(tree.paths, key=lambda p: (len(p), p))
        drafted.append(dict(zip(paths, session.trace[0]["draft_tokens"])))
    assert drafted[1].items() <= drafted[0].items()


# ------------------------------------------------------------------- the comparisons above can fail


def wrong_level_position(forward):
    def shifted(self, embedded, features, positions, cache, window):  # levels of the tree only
        positions = positions + (positions is not window.slots)
        return forward(self, embedded, features, positions, cache, window)

    return shifted


def swapped_inputs(forward):
    return lambda self, embedded, features, *rest: forward(self, features, embedded, *rest)


def slots_as_positions(forward):
    def wrong(self, tokens, positions, cache, window, *options, **aux_layers):
        return forward(self, tokens, window.slots, cache, window, *options, **aux_layers)

    return wrong


def late_features(extend):
    def late(self, state, rows):
        return extend(self, state, rows._replace(features=rows.features.roll(1, dims=1)))

    return late


DEFECTS = {  # where a function is replaced
    wrong_level_position: (eagle_draft.EagleHead, "forward"),
    swapped_inputs: (eagle_draft.EagleHead, "forward"),
    slots_as_positions: (model.Transformer, "forward"),
    late_features: (EagleDrafter, "extend"),
}


@pytest.mark.parametrize("name", [GREEDY[0], GREEDY[3]])
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_noticed(defect, name, monkeypatch):
    """By both comparisons."""
    owner, function = DEFECTS[defect]
    monkeypatch.setattr(owner, function, defect(getattr(owner, function)))
    case = golden_case(name)
    calls = recorders(monkeypatch)
    for run in case["runs"]:
        found = differences(replay(case, run, monkeypatch), case, run)
        if any(f.endswith("draft_tokens") for f in found):
            break
    assert any(f.endswith("draft_tokens") for f in found)
    assert largest_error(calls, case, case["runs"][0]) > TOLERANCE


def other_head(**changes):
    """The recorded head of version 3 with other facts about it."""
    case = golden_case(GREEDY[3])
    target, files = golden_target(case["target"]), WeightFiles(GOLDEN / case["head"])
    files.config |= changes
    return case, load_head(files.path, target, source=files)


@pytest.mark.parametrize(
    "changes",
    [
        {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},  # outputs taken for inputs
        {"norm_before_residual": True},
        {"rope_theta": 500000.0},  # the target's
        {"transformer_layer_config": json.loads((GOLDEN / "models/head_eagle3/config.json").read_text()), "norm_output": True},
        {"rms_norm_eps": 1e-2},
    ],
    ids=str,
)  # fmt: skip
def test_another_head_is_noticed(changes, monkeypatch):
    case, head = other_head(**changes)
    calls = recorders(monkeypatch)
    replay(case, case["runs"][0], monkeypatch, drafter_of(case, head))
    assert largest_error(calls, case, case["runs"][0]) > TOLERANCE


def test_a_head_may_say_what_is_so(monkeypatch):
    """As above; the same as inputs, and the outputs before them."""
    for changes in (
        {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]},
        {"target_layer_ids": [1, 3, 4]},
    ):
        case, head = other_head(**changes)
        session = replay(case, case["runs"][0], monkeypatch, drafter_of(case, head))
        assert differences(session, case, case["runs"][0]) == []


@pytest.mark.parametrize("name", GREEDY[:2])
def test_the_wrong_eps_is_noticed(name, monkeypatch):
    """The head's is 1e-5 here; many official heads have 1e-6. No draft changes, the floats do."""
    case = golden_case(name)
    head = golden_head(case["head"], golden_target(case["target"]))
    assert head.layers[0].ffn_norm.eps == 1e-5
    head.layers[0].ffn_norm.eps = 1e-6
    calls = recorders(monkeypatch)
    replay(case, case["runs"][0], monkeypatch, drafter_of(case, head))
    assert largest_error(calls, case, case["runs"][0]) > TOLERANCE
