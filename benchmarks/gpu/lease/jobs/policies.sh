# What plain FP8 does to a real language model, and to policies with experts and without QK-norm: one policy after the
# other, its arms at once.
. ~/lease.env
flock ~/alone.lock true # what began before it is over
export OMP_NUM_THREADS=1
teach plain &
teach moe &
kernels benchmarks/learning/h200/shared/{smollm2,qk-norm} # folders with a config.json; the others have qk-norm's layers
for policy in smollm2 plain moe; do
    [ $policy = smollm2 ] || wait
    python3 -m benchmarks.learning.run ~/res/learning --policy $policy --arms bf16 fp8 fp8-adaptive \
        --seeds $([ $policy = smollm2 ] && echo 3 || echo 1) --at-once 3 --memory 0.1 --changes-every 25
done
