#!/usr/bin/env bash
# Second call, 430 s: at once on the warm machine, or after mends on a fresh one with LIMIT=230.
#
#     bash scripts/gpu/call2.sh
#     PARTS="bf16 int4 profile" BF16=3,5 LIMIT=230 bash scripts/gpu/call2.sh
#     DEVICE=cpu LIMIT=300 bash scripts/gpu/call2.sh       # rehearse on any machine
#
# PARTS, in the order to run them: papers, whole, gptfast, profile, gptfast-bf16, gptfast-int8;
# and on demand bf16, int4, int8 (the ladder again, with the rungs of BF16, INT4, INT8). Other
# variables: parts.sh.
LIMIT=${LIMIT:-430}
source "$(dirname "$0")/parts.sh"

TREE=eagle:dynamic:tree_depth=6:tree_topk=8:tree_size=32
PAPERS=("$PY" scripts/bench/papers.py --device "$DEVICE" --dtype bfloat16 --compile --tasks demo)
PAPERS+=(--traced 1 --quant int4 --methods "none,$TREE")
LADDER=("$PY" scripts/gpu/ladder.py --device "$DEVICE" --json "$OUT/ladder.jsonl")
BESIDE=("$PY" scripts/gpu/beside.py --device "$DEVICE" --json "$OUT/beside.jsonl")
PROFILE=("$PY" generate.py --device "$DEVICE" --checkpoint checkpoints/demo --prompt "def f(x):")
PROFILE+=(--dtype bfloat16 --compile --quant int4 --draft none --ignore_eos -n 16)
REPLAYS=200
if [ "$DEVICE" = cpu ]; then
    PAPERS+=(--limit 1 --max_new_tokens 8 --options ignore_eos)
    LADDER+=(--dry_run)
    BESIDE+=(--small --new 8)
    REPLAYS=2
else
    PAPERS+=(--limit 3 --options inflate=llama2-7b,ignore_eos)
    PROFILE+=(--inflate llama2-7b)
fi
# the GPU's bandwidth is measured once, and handed on
at=$SECONDS
part bandwidth 60 "$PY" scripts/gpu/probe.py --device "$DEVICE" --probe facts,bandwidth \
    --json "$OUT/probes.jsonl"
set_pace $((SECONDS - at - 8))
GPT_EAGLE_BANDWIDTH=$("$PY" scripts/gpu/table.py "$OUT" --bandwidth)
export GPT_EAGLE_BANDWIDTH

for name in ${PARTS:-papers whole gptfast profile gptfast-bf16 gptfast-int8}; do
    case $name in
    bf16) again bf16 "$(paced 125)" "${LADDER[@]}" --quant none --quant_draft int4 --rungs "${BF16:-3,5}" ;;
    int4) again int4 "$(paced 110)" "${LADDER[@]}" --quant int4 --rungs "${INT4:-3,5}" ;;
    int8) again int8 "$(paced 80)" "${LADDER[@]}" --quant int8 --rungs "${INT8:-3,5}" ;;
    papers) part papers "$(paced 100)" "${PAPERS[@]}" --replays $REPLAYS --json "$OUT/papers.jsonl" ;;
    gptfast) again gptfast "$(paced 90)" "${BESIDE[@]}" --what gptfast-int4 ;;
    gptfast-*) again "$name" "$(paced 150)" "${BESIDE[@]}" --what "$name" ;;
    profile) part profile "$(paced 80)" "${PROFILE[@]}" --profile "$OUT/trace.json" ;;
    whole)
        part whole "$(paced 90)" env TORCHINDUCTOR_COMPILE_THREADS=1 "$PY" -m pytest -v -m smoke \
            -k "captured_cycles or four_rows or trees_equal or the_demo" -n 6 --maxprocesses 6 \
            --dist load --maxschedchunk 1 --tb=short -p no:cacheprovider tests/cuda/test_gpu.py
        ;;
    *) say "== $name: there is no such part" && fault "$name" ;;
    esac
done
grep -aE "tokens/s|one cycle of|by [0-9]+ x|note:|^(FAILED|ERROR) |=.* in [0-9.]+s" "$OUT/log.txt" |
    tail -60 | cut -c1-260 | tee -a "$OUT/summary.txt"
"$PY" scripts/gpu/table.py "$OUT" | tee -a "$OUT/summary.txt"
say "$((SECONDS - BEGAN)) s; faults:${FAULTS:- none}"
say "NEXT: copy the results and hand the machine back"
