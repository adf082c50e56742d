# For two GPUs: answers of 2,048 tokens by a policy of Qwen3-1.7B's shape, in FP8 and then in BF16. verl on the first GPU,
# TRL with a colocated engine on the second, each with half of the cores; then what another job wants of the second.
# predict_long_answers.sh has the predictions. The vocabulary is the model's own: with fewer words it has under
# 1.5B parameters, and random weights end more answers.
. ~/lease.env
export VLLM_USE_DEEP_GEMM_E8M0=0
half=$(($(nproc --all) / 2))
policy=(--model Qwen/Qwen3-1.7B)
long=("${policy[@]}" --vocabulary 151936 --response 2048 --micro-batch 8 --memory 0.4 --steps 5)

freed() { # GPU: end what a part has left of Ray, and wait for the memory
    python3 -m ray.scripts.scripts stop --force > /dev/null 2>&1
    for _ in $(seq 20); do
        [ "$(nvidia-smi -i "$1" --query-gpu=memory.used --format=csv,noheader,nounits)" -gt 3000 ] || return
        sleep 2
    done
}
verls() {
    export CUDA_VISIBLE_DEVICES=0
    taskset -cp "0-$((half - 1))" $BASHPID
    for part in fp8plan bf16; do
        verl long "$part" "${long[@]}" --limit-s 500
        tail -qc 100000 /tmp/ray/session_latest/logs/worker*.err > ~/res/long."$part".err
        freed 0
    done
}
trls() {
    export CUDA_VISIBLE_DEVICES=1
    taskset -cp "$half-$((2 * half - 1))" $BASHPID
    PYTHONPATH=$PYTHONPATH:$HOME/trl python3 -m benchmarks.gpu.trl_colocated "${policy[@]}" --folder ~/res/long/model \
        --gpu "$(gpu)" --output ~/res/trl_colocated.jsonl --deadline 420
    [ ! -e ~/fp8plan/anchor.sh ] || timeout 480 bash ~/fp8plan/anchor.sh > ~/res/anchor.log 2>&1
}
both() {
    verl long fp8plan "${long[@]}" --dry-run & # makes the model and the prompts, which all parts use
    kernels Qwen/Qwen3-1.7B
    wait
    verls > ~/res/verls.log 2>&1 &
    trls > ~/res/trls.log 2>&1 &
    wait
}
alone both
