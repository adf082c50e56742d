#!/usr/bin/env bash
# Predict 1,024 and 768 requests with CUDA graphs for all of them, from rollouts without such graphs on an H100.
#     bash benchmarks/gpu/lease/predict_above_graphs.sh FOLDER OBSERVED
# FOLDER then has N.json and N.txt by the profile alone, and N_anchored.json and N_anchored.txt with --observed.
set -euo pipefail
out=${1:?usage: predict_above_graphs.sh FOLDER OBSERVED}
mkdir -p "$out"
predict() { # NAME REQUESTS OPTION...
    fp8plan plan Qwen/Qwen3-1.7B --gpu h100_sxm --engine-version 0.26.0 --precision bf16 --prompts "$2" --samples 1 \
        --prompt-lengths fixed:256 --response-lengths fixed:256 --gpu-memory-utilization 0.85 --max-model-len 2048 \
        --max-num-seqs 1024 --max-cudagraph-capture-size 1024 --json "$out/$1.json" "${@:3}" > "$out/$1.txt"
}
for requests in 768 1024; do
    predict $requests $requests
    predict ${requests}_anchored $requests --observed "$2"
done
