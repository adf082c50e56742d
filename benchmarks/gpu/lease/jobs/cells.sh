# Qwen3-30B-A3B with 512 requests, whose records have the garbage collector's pauses (profiles/README.md). They replace
# those of the same key in profiles/h200_sxm/vllm-0.26.0/validation. Then the kernels of Qwen3-14B's decode steps there, of
# which BF16 takes 5% less than predicted and FP8 up to 2% more, to see in which kernels. Its rollouts replace nothing.
. ~/lease.env
measure() { # MODEL FILE [OPTION...]
    python3 -m fp8plan.runtime.measure.rollouts.run --cells fp8plan/runtime/measure/cells/validation.json \
        --model "$1" --workload "batch 512" --trace --timeout 600 --output ~/res/"$2" "${@:3}"
}
cells() {
    kernels Qwen/Qwen3-30B-A3B Qwen/Qwen3-14B
    measure Qwen/Qwen3-30B-A3B validation.jsonl
    measure Qwen/Qwen3-14B kernels.jsonl --kernels --precision bf16 --precision fp8_block
}
alone cells
