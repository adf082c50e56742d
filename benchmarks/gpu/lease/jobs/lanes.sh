# For two H200s: layouts over both (the lines of `all` in benchmarks/families/queue.txt), then TRL's server mode. Then,
# with half of the cores each, `cells` on the first; on the second `learning`, whose policy is taught while kernels
# compile.
. ~/lease.env
[ "$(nvidia-smi -L | grep -c H200)" = 2 ] || { echo "cells want H200s: $(nvidia-smi -L)"; exit 1; }
export LANES=1
CUDA_VISIBLE_DEVICES=1 teach qk-norm &
kernels Qwen/Qwen3-0.6B Qwen/Qwen3-30B-A3B fp8plan/qwen3-next-16-layers@2 ByteDance-Seed/Seed-OSS-36B-Instruct@2 \
    benchmarks/learning/h200/shared/qk-norm
wait
mkdir -p ~/kernels ~/res/layouts
cp -r ~/.cache/vllm ~/kernels/vllm
cp -r ~/.tensorrt_llm ~/kernels/trtllm
grep '^all|' benchmarks/families/queue.txt > ~/layouts.txt
TIMEOUT=240 DEEP_GEMM=~/kernels bash benchmarks/families.sh ~/res/layouts 420 ~/layouts.txt
trl_server

half=$(($(nproc) / 2))
lane() { # GPU CORES JOB...: with caches of its own, as a record counts what is compiled
    mkdir ~/lane"$1"
    cp -r ~/kernels/. ~/lane"$1"
    export CUDA_VISIBLE_DEVICES=$1 VLLM_CACHE_ROOT=~/lane$1/vllm TRTLLM_DG_CACHE_DIR=~/lane$1/trtllm
    export TRITON_CACHE_DIR=~/lane$1/triton TORCHINDUCTOR_CACHE_DIR=~/lane$1/inductor
    for job in "${@:3}"; do
        taskset -c "$2" bash "benchmarks/gpu/lease/jobs/$job.sh" > ~/res/"$job".log 2>&1
    done
}
lane 0 "0-$((half - 1))" cells &
lane 1 "$half-$((2 * half - 1))" learning &
wait
