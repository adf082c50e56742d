# For one GPU: TRL with a colocated engine and answers of 2,048 tokens, as in long_answers.sh, in FP8 and then in BF16.
. ~/lease.env
export VLLM_USE_DEEP_GEMM_E8M0=0
trls() {
    verl long fp8plan --model Qwen/Qwen3-1.7B --vocabulary 151936 --response 2048 --dry-run
    PYTHONPATH=$PYTHONPATH:$HOME/trl python3 -m benchmarks.gpu.trl_colocated --model Qwen/Qwen3-1.7B \
        --folder ~/res/long/model --gpu "$(gpu)" --output ~/res/trl_colocated.jsonl --steps 3 --deadline 360
}
alone trls
