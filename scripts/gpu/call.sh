#!/usr/bin/env bash
# Checks and rates on a GPU machine, part after part, each within its limit (README.md here).
#
#     bash scripts/gpu/call.sh                         # faults, then rates from the safest rung up
#     LIMIT=430 bash scripts/gpu/call.sh bandwidth papers whole gptfast-int4 profile
#     DEVICE=cpu LIMIT=600 bash scripts/gpu/call.sh    # rehearse on any machine
#
# OUT     folder of results (default: gpu_results): summary.txt to read, log.txt with all output
# LIMIT   seconds of the whole call (default: 400)
# PACE    percent of the parts' limits (default: 100); more on a slow machine
# DEVICE  cuda, or cpu to rehearse the call on any machine
# PY      the program to run (default: python3)
# BF16, INT4, INT8: the rungs of each (ladder.py); SHAPE: of the stand-in

cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
PY=${PY:-python3}
DEVICE=${DEVICE:-cuda}
OUT=${OUT:-gpu_results}
LIMIT=${LIMIT:-400}
PACE=${PACE:-100}
BEGAN=$SECONDS
FAULTS=""
mkdir -p "$OUT" || exit 1
export PYTHONUNBUFFERED=1
export PATH=$PATH:/usr/local/cuda/bin
# no C++ operators for the CPU: building them takes 20 to 40 s, and no part on CUDA needs them
[ "$DEVICE" = cuda ] && export GPT_EAGLE_MARCH=none

say() {
    echo "$*" | tee -a "$OUT/summary.txt"
}

fault() {
    [[ " $FAULTS " == *" $1 "* ]] || FAULTS="$FAULTS $1"
}

run() {  # NAME SECONDS COMMAND...: a process group with a limit; returns its exit status
    local name=$1 most=$2 rest=$((LIMIT - SECONDS + BEGAN)) rc at=$SECONDS
    shift 2
    ((most > rest)) && most=$rest
    if ((most < 5)); then
        say "== $name: not begun, since ${rest} s are left"
        fault "$name"
        return 124
    fi
    echo "\$ $*" >>"$OUT/log.txt"
    timeout -k 5 "$most" "$@" >>"$OUT/log.txt" 2>&1
    rc=$?
    say "== $name: $((SECONDS - at)) s, exit status $rc"
    ((rc)) && fault "$name"
    return $rc
}

part() {  # NAME SECONDS COMMAND...: at this machine's pace
    run "$1" $(($2 * PACE / 100)) "${@:3}"
}

again() {  # NAME SECONDS COMMAND...: once more behind an attempt that hung or lost the device
    local name=$1 until=$((SECONDS + $2 * PACE / 100)) rc
    shift 2
    for _ in 1 2 3; do
        run "$name" $((until - SECONDS)) "$@"
        rc=$?
        # 0: well; 2: a wrong option; 4: all was tried (attempts.py); 124, 137: the time was over
        case $rc in 0 | 2 | 4 | 124 | 137) break ;; esac
    done
    return $rc
}

# the tests source this file for the functions above
[ "${BASH_SOURCE[0]}" = "$0" ] || return 0

PROBE=("$PY" scripts/gpu/probe.py --device "$DEVICE" --json "$OUT/probes.jsonl")
FAMILIES=facts,capture,clock,families
PROCESSES=$(nproc)
((PROCESSES > 12)) && PROCESSES=12
# each process with processes of its own to compile would be too many
TESTS=(env TORCHINDUCTOR_COMPILE_THREADS=1 "$PY" -m pytest -v -m smoke --dist load)
TESTS+=(-n "$PROCESSES" --maxprocesses "$PROCESSES" --maxschedchunk 1 --tb=short)
TESTS+=(-p no:cacheprovider tests/cuda/test_gpu.py)
WHOLE="captured_cycles or four_rows or trees_equal or the_demo"
LADDER=("$PY" scripts/gpu/ladder.py --device "$DEVICE" --json "$OUT/ladder.jsonl")
LADDER+=(--inflate "${SHAPE:-llama2-7b}")
BESIDE=("$PY" scripts/gpu/beside.py --device "$DEVICE" --json "$OUT/beside.jsonl")
PAPERS=("$PY" scripts/bench/papers.py --device "$DEVICE" --dtype bfloat16 --compile --tasks demo)
PAPERS+=(--traced 1 --quant int4 --json "$OUT/papers.jsonl")
PAPERS+=(--methods none,eagle:dynamic:tree_depth=6:tree_topk=8:tree_size=32)
PROFILE=("$PY" generate.py --device "$DEVICE" --checkpoint checkpoints/demo --prompt "def f(x):")
PROFILE+=(--dtype bfloat16 --ignore_eos --compile --quant int4 --draft none -n 16)
if [ "$DEVICE" = cpu ]; then
    FAMILIES=facts,capture,clock
    LADDER+=(--dry_run)
    BESIDE+=(--small --new 8)
    PAPERS+=(--limit 1 --max_new_tokens 8 --options ignore_eos --replays 2)
else
    PAPERS+=(--limit 3 --options inflate=llama2-7b,ignore_eos --replays 200)
    PROFILE+=(--inflate llama2-7b)
fi

climb() {  # NAME SECONDS RUNGS OPTION...: the ladder, without families whose probe failed
    local wrong
    wrong=$("$PY" scripts/gpu/table.py "$OUT" --wrong)
    [ -n "$wrong" ] && say "PyTorch replaces on every rung: $wrong"
    again "$1" "$2" "${LADDER[@]}" --plain "$wrong" --rungs "$3" "${@:4}"
}

[ $# = 0 ] && set -- families kernels bf16 int4 int8 transformers
for name in "$@"; do
    case $name in
    families) again families 120 "${PROBE[@]}" --probe $FAMILIES ;;
    kernels) part kernels 75 "${TESTS[@]}" -k "not ($WHOLE)" ;;
    whole) part whole 90 "${TESTS[@]}" -n 6 --maxprocesses 6 -k "$WHOLE" ;;
    bf16) climb bf16 165 "${BF16:-3,5}" --quant none --quant_draft int4 ;;
    int4) climb int4 115 "${INT4:-3,5}" --quant int4 ;;
    int4-32) climb int4-32 115 "${INT4:-3}" --quant int4 --group_size 32 ;;  # gpt-fast's default
    int8) climb int8 80 "${INT8:-5}" --quant int8 ;;
    sampled) climb sampled 60 3 --quant int4 --temperature 1 --methods vanilla,tree,chain,lookup ;;
    batch) climb batch 60 3 --quant int4 --batch_size 4 --methods vanilla,tree ;;
    transformers) again transformers 60 "${BESIDE[@]}" --what transformers ;;
    gptfast-*) again "$name" 150 "${BESIDE[@]}" --what "$name" ;;
    papers) part papers 100 "${PAPERS[@]}" ;;
    profile) part profile 80 "${PROFILE[@]}" --profile "$OUT/trace.json" ;;
    fidelity)  # of the formats, on the CPU
        part fidelity 30 "$PY" quantize.py --checkpoint checkpoints/demo --quant int4 \
            --group_size 32 --out "$OUT/demo-int4-32" --overwrite
        part fidelity 60 "$PY" scripts/bench/fidelity.py --checkpoint checkpoints/demo \
            --also "$OUT/demo-int4-32" --json "$OUT/fidelity.json"
        rm -r "$OUT/demo-int4-32"
        ;;
    bandwidth)  # of the GPU: measured once, and handed on
        part bandwidth 60 "${PROBE[@]}" --probe facts,bandwidth
        GPT_EAGLE_BANDWIDTH=$("$PY" scripts/gpu/table.py "$OUT" --bandwidth)
        export GPT_EAGLE_BANDWIDTH
        ;;
    *) say "== $name: there is no such part" && fault "$name" ;;
    esac
done
grep -aE "one cycle of|by [0-9]+ x|note:|^(FAILED|ERROR) |=.* in [0-9.]+s" "$OUT/log.txt" |
    tail -60 | cut -c1-260 | tee -a "$OUT/summary.txt"
"$PY" scripts/gpu/table.py "$OUT" | tee -a "$OUT/summary.txt"
say "$((SECONDS - BEGAN)) s; faults:${FAULTS:- none}"
[ -z "$FAULTS" ]
