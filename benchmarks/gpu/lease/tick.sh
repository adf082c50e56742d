#!/usr/bin/env bash
# One beat of a lease: start jobs, wait until all jobs have ended but at most SECONDS, and bring back what there is.
#     bash benchmarks/gpu/lease/tick.sh SECONDS [JOB...]
# JOB: a script in jobs/, started unless it was; its log is ~/res/JOB.log. What it writes to ~/res comes back.
set -u
here=$(dirname "$0")
seconds=${1:?usage: tick.sh SECONDS [JOB...]}
shift
mkdir -p ~/started ~/res
for job in "$@"; do
    [ -f "$here/jobs/$job.sh" ] || { echo "no job $job; there are $(ls "$here/jobs")" >&2; exit 2; }
    if [ ! -e ~/lease.env ] && grep -q lease.env "$here/jobs/$job.sh"; then
        echo "no lease.env for $job: begin.sh has not run here, or failed" >&2
        exit 2
    fi
    mkdir ~/started/"$job" 2> /dev/null || continue
    cp "$here/jobs/$job.sh" ~/started/"$job"
    echo "$job" >> ~/begun
    setsid bash -c 'bash "$0/$1.sh"; touch "$0/ended"' ~/started/"$job" "$job" > ~/res/"$job".log 2>&1 < /dev/null &
    echo $! > ~/started/"$job"/group
done
running() {
    for job in ~/started/*; do
        [ -e "$job/ended" ] || [ ! -e "$job" ] || return 0
    done
    return 1
}
until=$((SECONDS + seconds))
while [ $SECONDS -lt $until ] && running; do sleep 1; done
tail -n 2 ~/res/*.log
nvidia-smi --query-gpu=utilization.gpu,memory.used --format=csv,noheader
# A file that comes back has 16 MiB at most: cat res.tgz.* | tar -xz
tar -C ~ --exclude='*.safetensors' --exclude='*.pt' -cz res | split -b 15M -d -a 2 - "$OUT/res.tgz."
cd
kernels=$(ls -d .cache/vllm/deep_gemm .tensorrt_llm .cache/flashinfer 2> /dev/null)
[ -z "$kernels" ] || tar -cz $kernels | split -b 15M -d -a 1 - "$OUT/kernels.tgz."
