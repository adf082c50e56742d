# Levers of `fp8plan tune` on Qwen3-4B in BF16 (benchmarks/levers.py): three engines, about 10 minutes. What is committed goes on.
. ~/lease.env
committed=benchmarks/results/levers_h200/runs.jsonl
[ -e ~/res/levers.jsonl ] || [ ! -e $committed ] || cp $committed ~/res/levers.jsonl
levers() {
    local engine
    host_loop
    for engine in plain ngram eagle3; do
        timeout 600 python3 -m benchmarks.gpu.levers $engine --output ~/res/levers.jsonl > ~/res/levers."$engine".log 2>&1
        tail -n 3 ~/res/levers."$engine".log
        emptied
    done
    host_loop
}
alone levers
