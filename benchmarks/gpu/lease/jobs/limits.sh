# Rollouts under several limits of two engines (benchmarks/results/limits_h100/cells.json), between timings of this host's
# loop. The defaults and the limits that `tune` names come first. Ten engines take about 25 minutes. What is committed goes on.
. ~/lease.env
card=$(gpu)
committed=benchmarks/results/limits_${card%_sxm}/rollouts.jsonl
[ -e ~/res/limits.jsonl ] || [ ! -e "$committed" ] || cp "$committed" ~/res/limits.jsonl
host() {
    for _ in 1 2 3; do host_loop; done
}
limits() {
    host
    python3 -m fp8plan.runtime.measure.rollouts.run --cells benchmarks/results/limits_h100/cells.json --gpu "$card" \
        --compile --trace --timeout 300 --output ~/res/limits.jsonl
    host
}
alone limits
