# Rollouts under several limits of two engines (benchmarks/results/limits_h100/cells.json), between timings of this host's
# loop. About 20 minutes; a lease may end first.
. ~/lease.env
host() {
    for _ in 1 2 3; do host_loop; done
}
limits() {
    host
    python3 -m fp8plan.runtime.measure.rollouts.run --cells benchmarks/results/limits_h100/cells.json --gpu "$(gpu)" \
        --compile --trace --timeout 300 --output ~/res/limits.jsonl
    host
}
alone limits
