# First the power of single kernels, for the fit (profiles/h200_sxm/vllm-0.26.0/kernels/power.jsonl). Then cells of
# profiles/h200_sxm/vllm-0.26.0/validation again. They replace the records of the same key, whatever comes out, if all
# four precisions of a group come back:
#   Qwen3-30B-A3B, batch 512: its records have the garbage collector's pauses (profiles/README.md); and batch 8, as its
#     engines are up
#   Qwen3-8B, batch 512: one of its cells was repeated with 5.6, 5.7 and 7.0 s, another with 4.8, 4.8 and 5.3 s
# Between them the kernels of Qwen3-14B's decode steps, of which BF16 takes 5% less than predicted and FP8 up to 2% more.
# Its rollouts replace nothing.
. ~/lease.env
measure() { # MODEL FILE [OPTION...]
    python3 -m fp8plan.runtime.measure.rollouts.run --cells fp8plan/runtime/measure/cells/validation.json \
        --model "$1" --trace --timeout 400 --output ~/res/"$2" "${@:3}"
}
cells() {
    kernels Qwen/Qwen3-8B Qwen/Qwen3-30B-A3B Qwen/Qwen3-14B
    python3 -m fp8plan.runtime.measure.kernels.power --output ~/res/kernels --gpu h200 --seconds 240
    measure Qwen/Qwen3-30B-A3B validation.jsonl --workload "batch 8" --workload "batch 512"
    measure Qwen/Qwen3-14B kernels.jsonl --workload "batch 512" --kernels --precision bf16 --precision fp8_block
    measure Qwen/Qwen3-8B validation.jsonl --workload "batch 512"
}
alone cells
