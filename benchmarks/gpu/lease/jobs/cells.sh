# Qwen3-30B-A3B with 512 requests, whose records have the garbage collector's pauses (profiles/README.md). They replace
# those of the same key in profiles/h200_sxm/vllm-0.26.0/validation.
. ~/lease.env
cells() {
    kernels Qwen/Qwen3-30B-A3B
    python3 -m fp8plan.runtime.measure.rollouts.run --cells fp8plan/runtime/measure/cells/validation.json \
        --model Qwen/Qwen3-30B-A3B --workload "batch 512" --trace --timeout 600 --output ~/res/validation.jsonl
}
alone cells
