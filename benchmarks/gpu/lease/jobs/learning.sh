# A mismatch that grows and stays: what the laws and constants are worth. The arms of FP8 that have one seed yet, and BF16
# beside them, as the policy is taught anew. Each of twelve that begin at once would compile the same 120 kernels, which
# took five minutes on 2026-11-25; so they are compiled while the policy is taught. Twelve runs take about 90 GiB, and with
# the job `policies` beside them 13 s a step: better a lease of its own.
. ~/lease.env
flock ~/alone.lock true # what began before it is over
export OMP_NUM_THREADS=1 # twelve runs share 16 cores
arms=(lasting-none lasting-tis lasting-adaptive lasting-least-error lasting-tis-1.1) # the most wanted first
arms+=(fp8-unit-kv fp8-least-error bf16)
teach qk-norm &
kernels benchmarks/learning/h200/shared/qk-norm # a folder with its config.json
wait
python3 -m benchmarks.learning.run ~/res/learning --policy qk-norm --arms "${arms[@]}" --seeds 3 --at-once 12 \
    --memory 0.24 --micro-tokens 8192 --changes-every 25
