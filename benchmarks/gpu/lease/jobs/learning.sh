# A mismatch that grows and stays: what the laws and constants are worth. The arms of FP8 that have one seed yet, and BF16
# beside them, as the policy is taught anew. Twelve at once take about 80 GiB, and two rounds of 8 minutes.
. ~/lease.env
flock ~/alone.lock true # what began before it is over
export OMP_NUM_THREADS=1 # twelve runs share 16 cores
arms=(lasting-none lasting-tis lasting-adaptive lasting-least-error lasting-tis-1.1) # the most wanted first
arms+=(fp8-unit-kv fp8-least-error bf16)
python3 -m benchmarks.learning.run ~/res/learning --policy qk-norm --arms "${arms[@]}" --seeds 3 --at-once 12 \
    --memory 0.24 --micro-tokens 8192 --changes-every 25
