# What plain FP8 does to policies without QK-norm, with experts, and to a real language model.
. ~/lease.env
flock ~/alone.lock true # what began before it is over
for policy in plain moe smollm2; do
    python3 -m benchmarks.learning.run ~/res/learning --policy $policy --arms bf16 fp8 fp8-adaptive --seeds 1 \
        --at-once 3 --memory 0.1 --changes-every 25 &
done
wait
