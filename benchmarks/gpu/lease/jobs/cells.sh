# Qwen3-14B and 30B-A3B with 512 requests, whose records were disturbed (profiles/README.md says by what). They replace
# those of the same key in profiles/h200_sxm/vllm-0.26.0/validation.
. ~/lease.env
cells() {
    for model in Qwen/Qwen3-14B Qwen/Qwen3-30B-A3B; do
        kernels "$model"
        python3 -m fp8plan.runtime.measure.rollouts.run --cells fp8plan/runtime/measure/cells/validation.json \
            --model "$model" --workload "batch 512" --trace --timeout 600 --output ~/res/validation.jsonl
    done
}
alone cells
