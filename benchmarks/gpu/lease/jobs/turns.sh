# Rollouts of turns on AsyncLLM, with tools that sleep, by benchmarks/results/turns/cells.json. Five engines in 15 minutes.
# Runs that have a record are left out. The last engine only splits the gain of FP8's KV cache.
. ~/lease.env
results=benchmarks/results/turns
if [ -e $results/rollouts.jsonl ] && [ ! -e ~/res/turns.jsonl ]; then
    cp $results/rollouts.jsonl ~/res/turns.jsonl
fi
cells() {
    kernels Qwen/Qwen3-8B Qwen/Qwen3-4B
    host_loop
    python3 -m fp8plan.runtime.measure.rollouts.run --cells $results/cells.json --trace --timeout 400 \
        --output ~/res/turns.jsonl
    host_loop
    python3 -m benchmarks.turns ~/res/turns.jsonl
}
alone cells
