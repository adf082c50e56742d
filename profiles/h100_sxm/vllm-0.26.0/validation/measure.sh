#!/usr/bin/env bash
# How the rollouts of this folder were measured, on one H100 with vLLM 0.26 on the PYTHONPATH, from the root of the repository:
#     bash profiles/h100_sxm/vllm-0.26.0/validation/measure.sh FOLDER h100_held_out Qwen/Qwen3-8B Qwen/Qwen3-30B-A3B
#     bash profiles/h100_sxm/vllm-0.26.0/validation/measure.sh FOLDER h100_anchor Qwen/Qwen3-14B Qwen/Qwen3-30B-A3B Qwen/Qwen3-1.7B
# Random weights would send all tokens to the same experts, so the experts are drawn evenly.
set -u
usage="usage: measure.sh FOLDER CELLS MODEL..."
out=$(realpath -m "${1:?$usage}") cells=fp8plan/runtime/measure/cells/${2:?$usage}.json
shift 2
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
python3 -m fp8plan.runtime.measure.kernels.compile --models "$@" --processes 15 > "$out/compile.log" 2>&1
for model in "$@"; do
    python3 -m fp8plan.runtime.measure.rollouts.run --cells "$cells" --model "$model" \
        --output "$out/rollouts.jsonl" --trace --timeout 400 --env VLLM_MOE_ROUTING_SIMULATION_STRATEGY=uniform_random
done
touch "$out/done"
