# For two GPUs: syncs by patches over NCCL, of a dense model and of one with experts, each with an engine in a process of
# its own. Only syncs are timed, so DeepGEMM's kernels are compiled as they are met.
. ~/lease.env
export VLLM_DEEP_GEMM_WARMUP=skip VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER=0
small='{"kv_cache_memory_bytes": 2000000000, "compilation_config": {"cudagraph_capture_sizes": [1]}}'
patches() {
    local model
    for model in Qwen/Qwen3-8B fp8plan/moe-7b; do
        python3 -m benchmarks.gpu.weight_sync --model $model --output ~/res/patches.jsonl --parts patches --utilization 0.3 \
            --precision fp8_block --trainer cuda:1 --mode multiprocess --nccl --engine-args "$small"
    done
}
alone patches
