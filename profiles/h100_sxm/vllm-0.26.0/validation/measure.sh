#!/usr/bin/env bash
# How the rollouts of this folder were measured, on one H100 with vLLM 0.26 on the PYTHONPATH, from the root of the repository:
#     bash profiles/h100_sxm/vllm-0.26.0/validation/measure.sh FOLDER
# Random weights would send all tokens to the same experts, so the experts are drawn evenly.
set -u
out=$(realpath -m "${1:?usage: measure.sh FOLDER}")
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
python3 -m benchmarks.gpu.compile_deep_gemm --models Qwen/Qwen3-8B Qwen/Qwen3-30B-A3B --processes 15 > "$out/compile.log" 2>&1
for model in Qwen/Qwen3-8B Qwen/Qwen3-30B-A3B; do
    python3 -m fp8plan.runtime.measure.rollouts.run --cells fp8plan/runtime/measure/cells/h100_held_out.json --model "$model" \
        --output "$out/rollouts.jsonl" --trace --timeout 400 --env VLLM_MOE_ROUTING_SIMULATION_STRATEGY=uniform_random
done
touch "$out/done"
