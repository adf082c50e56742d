# Cells of profiles/h200_sxm/vllm-0.26.0/validation whose records were disturbed: Qwen3-30B-A3B with 512 requests, by a host
# at twice the fastest loop, Qwen3-8B with 512 requests, of which one precision was repeated with 5.6, 5.7 and 7.0 s. They
# replace the records of the same cells, whatever comes out, if all four precisions come back.
. ~/lease.env
measure() { # MODEL [OPTION...]
    python3 -m fp8plan.runtime.measure.rollouts.run --cells fp8plan/runtime/measure/cells/validation.json \
        --model "$1" --trace --timeout 400 --output ~/res/validation.jsonl --workload "batch 512" "${@:2}" \
        --env VLLM_MOE_ROUTING_SIMULATION_STRATEGY=uniform_random
}
cells() {
    kernels Qwen/Qwen3-30B-A3B Qwen/Qwen3-8B
    measure Qwen/Qwen3-30B-A3B
    measure Qwen/Qwen3-8B
}
alone cells
