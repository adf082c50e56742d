# The runs of benchmarks.learning.verdict with the policy of 25M parameters, for two GPUs. Both arms of a seed are in one
# lease, as each lease teaches the policy anew.
. ~/lease.env
export OMP_NUM_THREADS=1
(CUDA_VISIBLE_DEVICES=0 teach qk-norm) &
kernels benchmarks/learning/gpus/shapes/qk-norm
wait

learn() { # AT_ONCE MEMORY FIRST_SEED SEEDS WORD...: memory: the share of a GPU for all engines of these at once
    python3 -m benchmarks.learning.run ~/res/learning --policy qk-norm --device cuda --at-once "$1" --memory "$2" \
        --first-seed "$3" --seeds "$4" --micro-tokens 8192 "${@:5}"
}
keep() {
    python3 -m benchmarks.learning.keep ~/res/learning/qk-norm ~/res/default_gpu.jsonl
}
# The second candidate: the first failed on a CPU.
learn 8 0.4 20 8 --arms lasting-tis lasting-level-4-2 --arms broken-tis broken-level-4-2 &
while jobs -r | grep -q .; do
    sleep 15
    keep
done
keep
