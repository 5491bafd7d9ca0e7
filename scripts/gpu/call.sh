#!/usr/bin/env bash
# Measure on a CUDA machine that is lent for minutes: bash scripts/gpu/call.sh [FOLDER OF RESULTS]
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
out=${1:-gpu_results} && mkdir -p "$out"
speed=(python3 scripts/measure.py speed --device cuda --dtype bfloat16 --checkpoint checkpoints/demo)
speed+=(--tasks demo --limit 3 --options random=llama2-7b,ignore_eos --json "$out/speed.jsonl")
trees=none,eagle:chain:tree_depth=5,eagle:dynamic:tree_depth=6:tree_topk=8:tree_size=32
{
    timeout 120 python3 -m pytest -m smoke -p no:cacheprovider tests/cuda/test_gpu.py
    for quant in int4 none int8; do timeout 150 "${speed[@]}" --quant $quant --methods $trees; done
    timeout 90 python3 scripts/measure.py attention --json "$out/kernels.jsonl"
    timeout 240 "${speed[@]}" --methods none,transformers:7b,gpt-fast:int4
} 2>&1 | tee -a "$out/log.txt"
python3 scripts/measure.py bars "$out/speed.jsonl"
