#!/usr/bin/env bash
# First call on a GPU machine, 400 s: every fault at once, then rates from the safest rung up.
#
#     bash scripts/gpu/call1.sh                    # on the machine; README.md beside this file
#     DEVICE=cpu LIMIT=300 bash scripts/gpu/call1.sh       # rehearse on any machine
#
# Variables, beside those of parts.sh: BF16, INT4, INT8, the rungs of each (ladder.py); SHAPE, of the
# stand-in.
LIMIT=${LIMIT:-400}
source "$(dirname "$0")/parts.sh"

# ------------------------------------------------------------------ faults
PROBES=facts,capture,clock,families
[ "$DEVICE" = cpu ] && PROBES=facts,capture,clock
at=$SECONDS
part facts 60 "$PY" scripts/gpu/probe.py --device "$DEVICE" --probe facts --json "$OUT/probes.jsonl"
set_pace $((SECONDS - at))
again families "$(paced 60)" "$PY" scripts/gpu/probe.py --device "$DEVICE" --probe $PROBES \
    --json "$OUT/probes.jsonl"
PROCESSES=$(nproc)
((PROCESSES > 12)) && PROCESSES=12
# each process with processes of its own to compile would be too many
part kernels "$(paced 75)" env TORCHINDUCTOR_COMPILE_THREADS=1 "$PY" -m pytest -v -m smoke \
    -k "not captured_cycles and not four_rows and not trees_equal and not the_demo" \
    -n "$PROCESSES" --maxprocesses "$PROCESSES" --dist load --maxschedchunk 1 --tb=short \
    -p no:cacheprovider tests/cuda/test_gpu.py
grep -aE "^(FAILED|ERROR) |=.* in [0-9.]+s" "$OUT/log.txt" | tail -40 | cut -c1-220 |
    tee -a "$OUT/summary.txt"

# ------------------------------------------------------------------ rates
WRONG=$("$PY" scripts/gpu/table.py "$OUT" --wrong)
[ -n "$WRONG" ] && say "PyTorch replaces on every rung: $WRONG"
LADDER=("$PY" scripts/gpu/ladder.py --device "$DEVICE" --json "$OUT/ladder.jsonl")
LADDER+=(--inflate "${SHAPE:-llama2-7b}" --plain "$WRONG")
[ "$DEVICE" = cpu ] && LADDER+=(--dry_run)
again bf16 "$(paced 165)" "${LADDER[@]}" --quant none --quant_draft int4 --rungs "${BF16:-3,5}"
again int4 "$(paced 115)" "${LADDER[@]}" --quant int4 --rungs "${INT4:-3,5}"
again int8 "$(paced 60)" "${LADDER[@]}" --quant int8 --rungs "${INT8:-5}"
DECISIVE=$FAULTS # another runtime's failure is no fault of ours
BESIDE=("$PY" scripts/gpu/beside.py --device "$DEVICE" --json "$OUT/beside.jsonl")
[ "$DEVICE" = cpu ] && BESIDE+=(--small --new 8)
again transformers "$(paced 60)" "${BESIDE[@]}" --what transformers

# ------------------------------------------------------------------ the end
"$PY" scripts/gpu/table.py "$OUT" | tee -a "$OUT/summary.txt"
say "$((SECONDS - BEGAN)) s; faults:${FAULTS:- none}"
if [ -z "$DECISIVE" ]; then
    say "NEXT: send call2.sh at once, while the machine is warm"
else
    say "NEXT: hand the machine back and read summary.txt; call2.sh on a fresh machine after mends"
fi
