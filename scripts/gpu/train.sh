#!/usr/bin/env bash
# Train the bundled head on a GPU machine that is lent for minutes (train.py), and bring it back.
#
#     bash scripts/gpu/train.sh                 # with the target in checkpoints/, or in parts:
#     xz -T0 -c checkpoints/SmolLM2-135M-Instruct.Q4_1.gguf | split -b 46M - brought/target.xz.
#
# OUT      folder of results (default: gpu_results): log.txt, and head.tar in parts of 15 MB
# LIMIT    seconds of the whole call (default: 560)
# WORK     folder of what stays there: answers and the state of training (default: lent)
# PY       the program to run (default: python3)
# OPTIONS  more options of train.py; CHECKED=no leaves out the target's SHA-256 (a rehearsal)
#
# The head is packed whenever it has become better, so a call that dies brings back the last one:
# cat head.tar.* | tar x, then bash scripts/gpu/train.sh with OPTIONS="--head head" goes on.

cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
PY=${PY:-python3}
OUT=${OUT:-gpu_results}
LIMIT=${LIMIT:-560}
WORK=${WORK:-lent}
TARGET=checkpoints/SmolLM2-135M-Instruct.Q4_1.gguf
LAST_S=12  # for packing and the way back
mkdir -p "$OUT" "$WORK" checkpoints || exit 1
export PYTHONUNBUFFERED=1
export PATH=$PATH:/usr/local/cuda/bin
command -v nvidia-smi >/dev/null && export GPT_EAGLE_MARCH=none  # no C++ operators are needed

if compgen -G "brought/*.whl" >/dev/null; then # the package gguf, where it is missing
    "$PY" -m pip install -q --no-index --no-deps --target "$WORK/site" brought/*.whl || exit 1
    PYTHONPATH=$(realpath "$WORK/site") && export PYTHONPATH
fi
if compgen -G "brought/target.xz.*" >/dev/null; then
    cat brought/target.xz.* | xz -dc >"$TARGET"
fi
if [ "${CHECKED:-yes}" = yes ]; then
    sum=$(sed -n 's/^    sha256="\(.*\)",$/\1/p' files/packaged.py)
    echo "$sum  $TARGET" | sha256sum --check --status || {
        echo "train.sh: $TARGET is not the whole model (SHA-256 $sum); bring all of its parts" >&2
        exit 2
    }
fi

pack() { # what is there of the head, in parts that a small way back takes
    [ "$WORK/head/training.json" -nt "$OUT/head.tar.aa" ] || return
    rm -f "$OUT"/head.tar.*
    tar c -C "$WORK" --exclude='*.pt' head | split -b 15M - "$OUT/head.tar."
}

left=$((LIMIT - SECONDS - LAST_S))
# shellcheck disable=SC2086  # options are words
timeout -k 5 $((left + LAST_S / 2)) "$PY" scripts/gpu/train.py --seconds "$left" --out "$WORK" $OPTIONS \
    >"$OUT/log.txt" 2>&1 &
training=$!
while kill -0 $training 2>/dev/null; do
    sleep 1
    ((SECONDS % 30 == 0)) && pack
done
wait $training
rc=$?
pack
cp "$WORK/rates.json" "$OUT/" 2>/dev/null
tail -n 40 "$OUT/log.txt" | cut -c1-240
echo "$SECONDS s; exit status $rc"
exit $rc
