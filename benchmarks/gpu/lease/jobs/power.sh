# The power of single kernels, and their clock from the first millisecond on: profiles/h200_sxm/vllm-0.26.0/kernels.
. ~/lease.env
power() {
    kernels Qwen/Qwen3-8B
    python3 -m fp8plan.runtime.measure.kernels.power --output ~/res/kernels --gpu h200
    python3 -m benchmarks.gpu.clock_course --output ~/res/kernels/clock_course.jsonl
}
alone power
