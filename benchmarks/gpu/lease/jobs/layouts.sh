# For two GPUs: experts over both, with FP8 weights, whose cells are in benchmarks/families/two_gpus.json.
. ~/lease.env
layouts() {
    kernels Qwen/Qwen3-30B-A3B@2
    python3 -m fp8plan.runtime.measure.rollouts.run --cells benchmarks/families/two_gpus.json --gpu "$(gpu)" \
        --model Qwen/Qwen3-30B-A3B --precision fp8_block+fp8_kv --trace --timeout 300 \
        --output ~/res/two_gpus.jsonl --env VLLM_MOE_ROUTING_SIMULATION_STRATEGY=uniform_random
}
alone layouts
