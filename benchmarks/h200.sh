#!/usr/bin/env bash
# What one H200 still has to measure, the most wanted first. On a machine with vLLM 0.26 on the PYTHONPATH:
#     bash benchmarks/h200.sh FOLDER [attention] [experts] [sync] [probe] [correction]
# FOLDER gets the raw records, a log of each part and `done` when all is over. Nothing else may run beside `sync` and
# `correction`: they are timed.
set -u
out=$(realpath -m "$1"); shift
parts=${*:-attention sync probe correction}
cd "$(dirname "$0")/.."
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

# attention -> kernels/attention.jsonl, experts -> kernels/moe.jsonl: the profile's rows and those of the full grid that
# it lacks (110 points of experts took 45 s). Then `fp8plan calibrate --fit-only` on a copy of the profile's folder with
# them and with the rows of kernels/machines.jsonl
grid() { # NAME: of a file of kernels
    mkdir -p "$out/kernels"
    cp "profiles/h200_sxm/vllm-0.26.0/kernels/$1.jsonl" "$out/kernels"
    timeout 400 python3 -m "fp8plan.runtime.measure.kernels.$1" --output "$out/kernels" --grid full --gpu h200 \
        --seconds 300 > "$out/$1.log" 2>&1
}
attention() { grid attention; }
experts() { grid moe; }

# sync -> weight_sync.jsonl: replaces the rows of Qwen3-30B-A3B in profiles/h200_sxm/vllm-0.26.0/weight_sync
sync() {
    timeout 900 python3 -m benchmarks.gpu.weight_sync --model Qwen/Qwen3-30B-A3B --utilization 0.29 \
        --output "$out/weight_sync.jsonl" --parts steps bare guard scales sleep fp8_in equal > "$out/sync.log" 2>&1
}

# probe -> probe/: a small model with structure is trained here, then each precision is measured on it: one after the
# other, as vLLM takes what another process has of the GPU for its own and finds nothing left.
probe() {
    local precision model=/tmp/structured
    mkdir -p "$out/probe"
    timeout 400 python3 -m benchmarks.gpu.structured_model --size large --output "$model" --device cuda \
        > "$out/train.log" 2>&1
    cp "$model/training.json" "$out/probe"
    for precision in bf16 fp8_block fp8_kv fp8_block+fp8_kv; do
        timeout 420 python3 -m fp8plan probe "$model" --gpu h200 --precision "$precision" \
            --prompts "$model/prompts.jsonl" --samples 4 --max-tokens 384 --gpu-memory-utilization 0.35 --json \
            --observations "$out/probe/$precision.csv" > "$out/probe/$precision.json" 2> "$out/probe_$precision.log"
    done
}

# correction -> correction.jsonl
correction() {
    timeout 200 python3 -m benchmarks.gpu.correction --output "$out/correction.jsonl" > "$out/correction.log" 2>&1
}

for part in $parts; do
    $part || echo "$part failed: see its log" >&2
done
touch "$out/done"
