# For two GPUs: the FP8 gain of a model with experts at TP 2, of which a public report says over 35% (docs/evidence/accuracy.md).
. ~/lease.env
reports() {
    kernels Qwen/Qwen3-30B-A3B@2
    python3 -m fp8plan.runtime.measure.rollouts.run --cells benchmarks/families/reports.json --gpu "$(gpu)" \
        --trace --timeout 400 --output ~/res/reports.jsonl --env VLLM_MOE_ROUTING_SIMULATION_STRATEGY=uniform_random
}
alone reports
