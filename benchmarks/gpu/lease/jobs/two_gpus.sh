# For two GPUs: verl on one each, with fp8plan's line in FP8 and in BF16; TRL's server mode; verl that trains on one GPU
# and samples on the other.
. ~/lease.env
kernels Qwen/Qwen3-0.6B & # or TRL's server takes over 300 s
CUDA_VISIBLE_DEVICES=0 RAY_TMPDIR=/tmp/r0 verl verl-fp8plan fp8plan &
CUDA_VISIBLE_DEVICES=1 RAY_TMPDIR=/tmp/r1 verl verl-bf16 bf16 &
wait
trl_server
verl verl-async fp8plan --gpus 2 --mode separate_async
