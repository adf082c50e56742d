# A mismatch that grows and stays: what the laws and constants are worth. Seeds, as many as there is time for.
. ~/lease.env
flock ~/alone.lock true # what began before it is over
arms=(lasting-none lasting-tis lasting-tis-1.1 lasting-adaptive lasting-least-error fp8-unit-kv) # the most wanted first
arms+=(fp8-least-error lasting-tis-1.4)
python3 -m benchmarks.learning.run ~/res/learning --policy qk-norm --arms "${arms[@]}" --seeds 3 --at-once 6 \
    --memory 0.2 --changes-every 25
