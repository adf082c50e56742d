# Rollouts of up to 1,024 requests, twice the largest captured graph, with each step's seconds.
. ~/lease.env
above() {
    kernels Qwen/Qwen3-1.7B
    for model in Qwen/Qwen3-1.7B Qwen/Qwen3-8B; do
        python3 -m fp8plan.runtime.measure.rollouts.run --cells fp8plan/runtime/measure/cells/above_graphs.json \
            --gpu "$(gpu)" --model $model --trace --timeout 300 --output ~/res/above_graphs.jsonl
    done
}
alone above
