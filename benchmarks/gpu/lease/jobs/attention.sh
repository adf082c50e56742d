# One engine with FP8 weights and KV for each attention kernel: syncs, rollouts, and fixed scales that clip.
. ~/lease.env
python3 -m fp8plan doctor --host || true
for kernel in FLASHINFER FLASH_ATTN TRITON_ATTN; do
    python3 -m benchmarks.gpu.weight_sync --model Qwen/Qwen3-8B --output ~/res/attention_backends.jsonl --steps 20 \
        --engine-args "{\"attention_backend\": \"$kernel\"}" --parts steps rollouts clip
done
python3 -m fp8plan doctor --host || true
