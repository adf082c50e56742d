# For two GPUs: verl on one, with fp8plan's line and without it, side by side; TRL's server mode; verl on both.
. ~/lease.env
verl() { # NAME PART [OPTION...]
    python3 -m benchmarks.gpu.verl_grpo --model Qwen/Qwen3-0.6B --parts "$2" --output ~/res/verl_grpo."$1".jsonl \
        --folder ~/res/"$1" --limit-s 500 "${@:3}"
}
python3 -m benchmarks.gpu.compile_deep_gemm --models Qwen/Qwen3-0.6B --processes 24 & # or TRL's server takes over 300 s
CUDA_VISIBLE_DEVICES=0 RAY_TMPDIR=/tmp/r0 verl verl-fp8plan fp8plan &
CUDA_VISIBLE_DEVICES=1 RAY_TMPDIR=/tmp/r1 verl verl-stock stock &
wait
PYTHONPATH=$PYTHONPATH:$HOME/trl python3 -m benchmarks.gpu.trl_server --output ~/res/trl_server.jsonl --deadline 400
verl verl-two fp8plan --gpus 2
verl verl-two stock --gpus 2
verl verl-async fp8plan --gpus 2 --mode separate_async
