# For two GPUs: TRL's server mode; verl on both, with fp8plan's line and without it; verl with that line in BF16 on one.
. ~/lease.env
verl() { # NAME PART [OPTION...]
    python3 -m benchmarks.gpu.verl_grpo --model Qwen/Qwen3-0.6B --parts "$2" --output ~/res/verl_grpo."$1".jsonl \
        --folder ~/res/"$1" --limit-s 600 "${@:3}"
}
python3 -m benchmarks.gpu.compile_deep_gemm --models Qwen/Qwen3-0.6B --processes 24 & # or TRL's server takes over 300 s
PYTHONPATH=$PYTHONPATH:$HOME/trl python3 -m benchmarks.gpu.trl_server --output ~/res/trl_server.jsonl --deadline 400 \
    --parts stock fp8plan
wait
verl verl-two fp8plan --gpus 2 --target-kl 0.003
verl verl-two stock --gpus 2
verl verl-async fp8plan --gpus 2 --mode separate_async
CUDA_VISIBLE_DEVICES=0 RAY_TMPDIR=/tmp/r0 verl verl-bf16 bf16 &
CUDA_VISIBLE_DEVICES=1 RAY_TMPDIR=/tmp/r1 verl verl-stock stock &
wait
