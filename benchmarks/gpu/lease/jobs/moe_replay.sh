# For two GPUs: GRPO of the policy with experts, with FP8 rollouts, with and without router replay, and with BF16 ones. Four
# seeds of each; the first seed of every arm first. MOE_AT_ONCE (6): runs that share a GPU.
. ~/lease.env
export OMP_NUM_THREADS=1
teach moe &
kernels benchmarks/learning/gpus/shapes/moe
wait
python3 -m benchmarks.learning.run ~/res/learning --policy moe --device cuda --at-once "${MOE_AT_ONCE:-6}" --memory 0.3 \
    --seeds 4 --micro-tokens 8192 --arms fp8 fp8-replay --arms bf16 &
while jobs -r | grep -q .; do
    sleep 15
    python3 -m benchmarks.learning.keep ~/res/learning/moe ~/res/moe_replay.jsonl
done
python3 -m benchmarks.learning.keep ~/res/learning/moe ~/res/moe_replay.jsonl
