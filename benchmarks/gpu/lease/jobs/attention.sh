# One engine with FP8 weights and KV for each attention kernel: rollouts, syncs, and fixed scales that clip.
. ~/lease.env
kernels Qwen/Qwen3-8B
python3 -m fp8plan doctor --host || true
for kernel in TRITON_ATTN FLASHINFER FLASH_ATTN; do
    python3 -m benchmarks.gpu.weight_sync --model Qwen/Qwen3-8B --output ~/res/attention_backends.jsonl --steps 20 \
        --engine-args "{\"attention_backend\": \"$kernel\"}" --parts rollouts steps clip
    python3 -m fp8plan doctor --host || true
done
