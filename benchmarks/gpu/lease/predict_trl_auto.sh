#!/usr/bin/env bash
# Predict the rollouts of jobs/trl_auto.sh as plan="auto" does it: with a host that is not known, and with hosts that were
# timed at 270 to 470 µs.
#     bash benchmarks/gpu/lease/predict_trl_auto.sh FOLDER
# FOLDER then has prior.json and prior.txt, and host_N.json and host_N.txt for a loop of N µs.
set -euo pipefail
out=${1:?usage: predict_trl_auto.sh FOLDER}
mkdir -p "$out"
predict() { # NAME OPTION...
    fp8plan plan meta-llama/Llama-3.2-3B --gpu h200_sxm --engine-version 0.33.0 --inside trl --prompts 32 --samples 8 \
        --prompt-lengths fixed:64 --response-lengths lognormal:mean=115.2,sigma=0.9,max=384 --max-model-len 448 \
        --gpu-memory-utilization 0.3 --max-num-seqs 256 --max-num-batched-tokens 4096 --json "$out/$1.json" "${@:2}" \
        > "$out/$1.txt"
}
predict prior
for loop in 270 370 470; do predict host_$loop --host-loop-us $loop; done
