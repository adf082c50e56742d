# What plan="auto" chooses in TRL with the host timed and with one that is not known, and rollouts of both choices in the
# trainer's engine. Kernels are compiled beside gpu_tests, but not beside the self-test's engine.
. ~/lease.env
export VLLM_USE_DEEP_GEMM_E8M0=0
model=meta-llama/Llama-3.2-3B
ended doctor
python3 -c "from benchmarks.gpu.trl_server import randomise; randomise('$model', '$HOME/llama')" &
kernels $model
wait
trl() {
    host_loop
    rm -f ~/.cache/fp8plan/host_loops.json # the trainer times the host itself
    PYTHONPATH=$PYTHONPATH:$HOME/trl python3 -m benchmarks.gpu.trl_colocated --model $model --folder ~/llama \
        --gpu "$(gpu)" --output ~/res/trl_auto.jsonl --precisions bf16 fp8_block --steps 5 --completion 384 --batch 256 \
        --micro-batch 8 --lengths planned --deadline 200
    host_loop
}
ended gpu_tests
alone trl
