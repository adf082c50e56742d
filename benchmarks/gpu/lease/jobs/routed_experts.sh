# Rollouts of Qwen3-30B-A3B's shape with and without returned experts. Each precision has two engines, one after the other.
# Routers are even, as in all measured rollouts. vLLM's own simulated routing sorts, which takes time. About 25 minutes; FP8
# comes first.
. ~/lease.env
ended remedies # which shares the GPU
results=benchmarks/results/routed_experts
if [ -e $results/rollouts.jsonl ] && [ ! -e ~/res/routed_experts.jsonl ]; then # runs that have a record are left out
    cp $results/rollouts.jsonl ~/res/routed_experts.jsonl
fi
cells() {
    local precision
    kernels Qwen/Qwen3-30B-A3B
    host_loop
    for precision in fp8_block bf16; do
        python3 -m fp8plan.runtime.measure.rollouts.run --cells $results/cells.json --precision $precision \
            --compile --trace --timeout 600 --output ~/res/routed_experts.jsonl
        host_loop
    done
}
alone cells
