# Syncs by patches, of an engine in the trainer's process and of one in another; with two GPUs, on the other GPU.
# Only syncs are timed, so DeepGEMM's kernels are compiled as they are met. About 6 minutes.
. ~/lease.env
export VLLM_DEEP_GEMM_WARMUP=skip VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER=0
small='{"kv_cache_memory_bytes": 2000000000, "compilation_config": {"cudagraph_capture_sizes": [1]}}'
measure() { # NAME GPUS MODEL [OPTION...]
    CUDA_VISIBLE_DEVICES=$2 python3 -m benchmarks.gpu.slow_links --model "$3" --output ~/res/slow_links_gpu."$1".jsonl \
        --engine-args "$small" "${@:4}" > ~/res/slow_links_gpu."$1".log 2>&1
}
measure inprocess 0 Qwen/Qwen3-8B &
if [ "$(nvidia-smi -L | wc -l)" -gt 1 ]; then
    measure experts 1 fp8plan/moe-7b --rates 3e-6
    wait
    measure apart 0,1 Qwen/Qwen3-8B --trainer cuda:1 --mode multiprocess --rates 1e-6 3e-6 1e-5
else
    wait
    measure experts 0 fp8plan/moe-7b --rates 3e-6
    measure process 0 Qwen/Qwen3-8B --mode multiprocess --rates 3e-6
fi
