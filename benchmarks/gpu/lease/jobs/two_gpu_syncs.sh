# For two GPUs: weight syncs of an engine over both, with tensor and with expert parallelism. Only bits are compared, so
# both share the GPUs. Their starts are 25 s apart.
# FlashInfer would compile its kernel of few rows for two minutes. On 2026-11-27 a lease of 6 minutes ended in the first
# syncs, as DeepGEMM compiled a kernel for each new prompt in 10 to 15 s. So all kernels are compiled first.
. ~/lease.env
export VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER=0 VLLM_DEEP_GEMM_WARMUP=skip
kernels Qwen/Qwen3-1.7B@2 fp8plan/moe-7b@2
graphs='"cudagraph_capture_sizes": [1, 16]'
sync() { # NAME MODEL [OPTION...]
    python3 -m benchmarks.gpu.weight_sync --model "$2" --output ~/res/weight_sync."$1".jsonl --tensor-parallel 2 \
        --utilization 0.25 --steps 10 --parts fresh steps equal "${@:3}" --engine-args \
        "{\"kv_cache_memory_bytes\": 2000000000, \"compilation_config\": {$graphs, \"pass_config\": {\"fuse_allreduce_rms\": false}}}"
}
sync dense Qwen/Qwen3-1.7B > ~/res/sync_dense.log 2>&1 &
sleep 25
sync experts fp8plan/moe-7b --expert-parallel > ~/res/sync_experts.log 2>&1 &
wait
