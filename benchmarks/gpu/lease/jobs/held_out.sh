# Rollouts that judge the H100's profile and that no fit sees: cells/h100_held_out.json. Then a few points of each kernel
# script of `calibrate`, to see that they run with this vLLM. The first three engines take 11 minutes. A lease may end first.
. ~/lease.env
measure() { # MODEL PRECISION...
    python3 -m fp8plan.runtime.measure.rollouts.run --cells fp8plan/runtime/measure/cells/h100_held_out.json --model "$1" \
        "${@:2}" --gpu "$(gpu)" --compile --trace --timeout 400 --output ~/res/held_out.jsonl \
        --env VLLM_MOE_ROUTING_SIMULATION_STRATEGY=uniform_random
}
cells() {
    measure Qwen/Qwen3-8B --precision bf16 --precision fp8_block+fp8_kv
    measure Qwen/Qwen3-30B-A3B --precision fp8_block+fp8_kv
    for kernel in gemm attention moe elementwise; do
        timeout 60 python3 -m "fp8plan.runtime.measure.kernels.$kernel" --output ~/res/kernels --grid quick --seconds 8
    done
    measure Qwen/Qwen3-8B --precision fp8_block --precision fp8_kv
}
alone cells
