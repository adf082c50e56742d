# What corrections are worth under a mismatch that lasts, the arms of FP8 without one, and the other policies, on two GPUs
# of 78 GiB. Each then has five runs of the policy of 25M parameters, two of the one with experts and one of SmolLM2. With
# kernels that were compiled before, 30 minutes should do.
. ~/lease.env
unpacked learning || exit 1
export OMP_NUM_THREADS=1
CUDA_VISIBLE_DEVICES=0 teach qk-norm &
CUDA_VISIBLE_DEVICES=1 teach moe &
kernels benchmarks/learning/gpus/shapes/{qk-norm,smollm2} # folders with a config.json; the others have qk-norm's layers
wait

learn() { # POLICY AT_ONCE MEMORY SEEDS ARM...: memory: the share of a GPU for all engines of these at once
    python3 -m benchmarks.learning.run ~/res/learning --policy "$1" --at-once "$2" --memory "$3" --seeds "$4" \
        --arms "${@:5}" --micro-tokens "$([ "$1" = smollm2 ] && echo 4096 || echo 8192)"
}
learn moe 2 0.12 1 bf16 fp8 fp8-adaptive &
learn smollm2 1 0.06 3 bf16 fp8 fp8-adaptive &
lasting=(lasting-none lasting-tis lasting-adaptive lasting-tis-1.1) # the most wanted first
learn qk-norm 5 0.175 3 "${lasting[@]}" fp8-unit-kv bf16
wait
