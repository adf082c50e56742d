# Rollouts that judge the H200's own profile of vLLM 0.33 and that no fit sees: profiles/h200_sxm/vllm-0.33.0/validation/cells.json.
# What is committed goes on. Six of the 18 engines are not measured: Qwen3-4B, Qwen3-30B-A3B and Mistral-7B in `fp8_block` and in `fp8_kv` alone. They take
# a quarter of an hour.
. ~/lease.env
[ -e ~/res/native_h200.jsonl ] || cp profiles/h200_sxm/vllm-0.33.0/validation/rollouts.jsonl ~/res/native_h200.jsonl
measure() { # MODEL PRECISION...
    python3 -m fp8plan.runtime.measure.rollouts.run --cells profiles/h200_sxm/vllm-0.33.0/validation/cells.json --model "$1" \
        $(printf -- '--precision %s ' "${@:2}") --compile --trace --timeout 400 --output ~/res/native_h200.jsonl
}
cells() {
    local model
    kernels Qwen/Qwen3-4B Qwen/Qwen3-14B Qwen/Qwen3-30B-A3B mistralai/Mistral-7B-v0.3
    host_loop
    for model in Qwen/Qwen3-30B-A3B mistralai/Mistral-7B-v0.3; do
        measure $model bf16 fp8_block+fp8_kv
        host_loop
    done
    measure Qwen/Qwen3-4B fp8_block+fp8_kv
    measure fp8plan/gpt-oss-20b-bf16 bf16 fp8_kv
    for model in Qwen/Qwen3-14B Qwen/Qwen3-30B-A3B Qwen/Qwen3-4B mistralai/Mistral-7B-v0.3; do
        measure $model fp8_block fp8_kv
        host_loop
    done
}
alone cells
