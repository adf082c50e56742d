# verl on two GPUs, with a target of the KL below what it is at first, so that thresholds move; and stock verl.
. ~/lease.env
verl() { # PART [OPTION...]
    python3 -m benchmarks.gpu.verl_grpo --model Qwen/Qwen3-0.6B --gpus 2 --parts "$1" --output ~/res/verl_grpo.two.jsonl \
        --folder ~/res/verl-two "${@:2}"
}
verl fp8plan --target-kl 0.003
verl stock
