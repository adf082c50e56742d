. ~/lease.env
alone python3 -m benchmarks.gpu.verl_grpo --model Qwen/Qwen3-1.7B --parts stock fp8plan --output ~/res/verl_grpo.jsonl \
    --folder ~/verl
