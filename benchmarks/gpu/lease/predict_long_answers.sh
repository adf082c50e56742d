#!/usr/bin/env bash
# Predict the rollouts of jobs/long_answers.sh, with the limits of their engines.
#     bash benchmarks/gpu/lease/predict_long_answers.sh FOLDER [OPTION...]
# FOLDER then has verl.json and trl.json, and the tables as verl.txt and trl.txt. OPTION: more words for `fp8plan plan`.
# An answer ends early with a chance of 1 to 151,936 for each token: 99% have 2,048 tokens, and the mean is 2,034.
set -euo pipefail
out=${1:?usage: predict_long_answers.sh FOLDER [OPTION...]}
mkdir -p "$out"
shift
predict() { # NAME OPTION...
    fp8plan plan Qwen/Qwen3-1.7B --gpu h100_sxm --engine-version 0.26.0 --accept high --samples 8 --max-model-len 2112 \
        --response-lengths fixed:2048 --json "$out/$1.json" "${@:2}" > "$out/$1.txt"
}
predict verl --inside verl --prompts 32 --prompt-lengths fixed:34 --gpu-memory-utilization 0.4 --max-num-seqs 256 \
    --max-num-batched-tokens 8192 "$@"
predict trl --inside trl --prompts 16 --prompt-lengths fixed:64 --gpu-memory-utilization 0.3 --max-num-seqs 128 \
    --max-num-batched-tokens 4096 "$@"
