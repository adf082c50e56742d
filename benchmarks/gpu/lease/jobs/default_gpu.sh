# The runs of benchmarks.learning.verdict with the policy of 25M parameters, for two GPUs. Both arms of a seed are in one
# lease, as each lease teaches the policy anew. They are the second candidate's: the first failed on a CPU.
. ~/lease.env
export OMP_NUM_THREADS=1
(CUDA_VISIBLE_DEVICES=0 teach qk-norm) &
kernels benchmarks/learning/gpus/shapes/qk-norm
wait
runs() {
    python3 -m benchmarks.learning.run ~/res/learning --policy qk-norm --device cuda --at-once 8 --memory 0.4 \
        --micro-tokens 8192 --first-seed 20 --seeds 8 --arms lasting-{tis,level-4-2} --arms broken-{tis,level-4-2}
}
(runs || runs) & # an engine's start may fail while others take memory
while jobs -r | grep -q .; do
    sleep 15
    python3 -m benchmarks.learning.keep ~/res/learning/qk-norm ~/res/default_gpu.jsonl
done
python3 -m benchmarks.learning.keep ~/res/learning/qk-norm ~/res/default_gpu.jsonl # runs that ended meanwhile
