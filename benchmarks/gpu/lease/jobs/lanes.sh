# For two GPUs: `cells` on the first with half of the cores; `learning`, then `policies`, on the second with the others.
. ~/lease.env
[ "$(nvidia-smi -L | grep -c H200)" = 2 ] || { echo "cells want H200s: $(nvidia-smi -L)"; exit 1; }
export LANES=1
half=$(($(nproc) / 2))
lane() { # GPU CORES JOB...
    for job in "${@:3}"; do
        CUDA_VISIBLE_DEVICES=$1 taskset -c "$2" bash "benchmarks/gpu/lease/jobs/$job.sh" > ~/res/"$job".log 2>&1
    done
}
lane 0 "0-$((half - 1))" cells &
lane 1 "$half-$((2 * half - 1))" learning policies &
wait
