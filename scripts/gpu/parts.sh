# Sourced by call1.sh and call2.sh: parts with limits, one log, one summary.
#
# OUT     folder of results (default: gpu_results): summary.txt to read, log.txt with all output
# LIMIT   seconds of the whole call
# DEVICE  cuda, or cpu to rehearse the call on any machine
# PY      the program to run (default: python3)

cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
PY=${PY:-python3}
DEVICE=${DEVICE:-cuda}
OUT=${OUT:-gpu_results}
mkdir -p "$OUT" || exit 1
export PYTHONUNBUFFERED=1
export PATH=$PATH:/usr/local/cuda/bin
# no C++ operators for the CPU: building them takes 20 to 40 s, and no part on CUDA needs them
[ "$DEVICE" = cuda ] && export GPT_EAGLE_MARCH=none

BEGAN=$SECONDS
FAULTS=""
PACE=100     # percent of the limits; more on a slow machine
USUAL_S=25   # that the first part takes, most of it the first import of torch

say() {
    echo "$*" | tee -a "$OUT/summary.txt"
}

left() {  # seconds of the whole call
    echo $((LIMIT - SECONDS + BEGAN))
}

paced() {  # SECONDS: at this machine's pace
    echo $(($1 * PACE / 100))
}

set_pace() {  # by the seconds that the first part took
    PACE=$((100 * $1 / USUAL_S))
    ((PACE < 100)) && PACE=100
    ((PACE > 300)) && PACE=300
    return 0
}

part() {  # NAME SECONDS COMMAND...: a process group with a limit; returns its exit status
    local name=$1 most=$2 rest rc at=$SECONDS
    shift 2
    rest=$(left)
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

fault() {
    [[ " $FAULTS " == *" $1 "* ]] || FAULTS="$FAULTS $1"
}

again() {  # NAME SECONDS COMMAND...: once more behind an attempt that hung or lost the device
    local name=$1 until=$((SECONDS + $2)) rc
    shift 2
    for _ in 1 2 3; do
        part "$name" $((until - SECONDS)) "$@"
        rc=$?
        # 0: well; 2: a wrong option; 4: all was tried (attempts.py); 124, 137: the time was over
        case $rc in 0 | 2 | 4 | 124 | 137) break ;; esac
    done
    return $rc
}
