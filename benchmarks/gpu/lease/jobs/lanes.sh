# For two H200s: layouts over both (the lines of `all` in benchmarks/families/queue.txt), then TRL's server mode. Then
# `cells` on the first, with half of the cores, as on a machine of one.
. ~/lease.env
[ "$(nvidia-smi -L | grep -c H200)" = 2 ] || { echo "cells want H200s: $(nvidia-smi -L)"; exit 1; }
kernels Qwen/Qwen3-0.6B Qwen/Qwen3-30B-A3B fp8plan/qwen3-next-16-layers@2 ByteDance-Seed/Seed-OSS-36B-Instruct@2
mkdir -p ~/kernels ~/res/layouts
cp -r ~/.cache/vllm ~/kernels/vllm
cp -r ~/.tensorrt_llm ~/kernels/trtllm
grep '^all|' benchmarks/families/queue.txt > ~/layouts.txt
TIMEOUT=240 DEEP_GEMM=~/kernels bash benchmarks/families.sh ~/res/layouts 420 ~/layouts.txt
trl_server

CUDA_VISIBLE_DEVICES=0 taskset -c "0-$(($(nproc) / 2 - 1))" bash benchmarks/gpu/lease/jobs/cells.sh > ~/res/cells.log 2>&1
