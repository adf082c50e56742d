. ~/lease.env
alone python3 -m benchmarks.gpu.verl_grpo --model Qwen/Qwen3-1.7B --output ~/res/verl_grpo.jsonl --folder ~/verl
