#!/usr/bin/env bash
# New model families under vLLM with random weights, on all GPUs of one host: rollouts, weight syncs.
#     bash benchmarks/families.sh FOLDER SECONDS [QUEUE]
# QUEUE (benchmarks/families/queue.txt) has a job a line, the most wanted first:
#     one|CELLS|MODEL|PRECISION              CELLS: a list of cells in benchmarks/families
#     one|sync|MODEL|PRECISION|ENGINE_ARGS   benchmarks.gpu.weight_sync; ENGINE_ARGS is JSON
#     all|CELLS|MODEL|PRECISION              an engine on all GPUs, before all jobs on one; left out where there is one GPU
# Two workers share a GPU, or all of them, with half of its cores each: one measures, while the other waits. No job begins after SECONDS, and none lasts longer than TIMEOUT (600). Experts are drawn
# evenly, by vLLM's own simulation. DEEP_GEMM names a folder of compiled kernels to start from
# (fp8plan.runtime.measure.kernels.compile): without it the first engine of a model with FP8 weights compiles for minutes.
set -u
out=$(realpath -m "$1"); last=$2; queue=$(realpath "${3:-$(dirname "$0")/families/queue.txt}")
cd "$(dirname "$0")/.."
measure=${MEASURE:-python3 -m fp8plan.runtime.measure.rollouts.run}
sync=${SYNC:-python3 -m benchmarks.gpu.weight_sync}
caches=${CACHES:-/tmp/families-caches}
cards=${CARDS:-$(nvidia-smi -L | wc -l)}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

say() { echo "$(date +%T) $*" >> "$out/jobs.txt"; }

on() { # CARD[,CARD...]: this shell's GPUs, and caches of the first
    local mine=$caches/${1%%,*}
    export CUDA_VISIBLE_DEVICES=$1 VLLM_CACHE_ROOT=$mine/vllm TRITON_CACHE_DIR=$mine/triton
    export TORCHINDUCTOR_CACHE_DIR=$mine/inductor TORCHINDUCTOR_COMPILE_THREADS=8 TRTLLM_DG_CACHE_DIR=$mine/trtllm
}

take() { # KIND: the first line of the queue for it, which is gone then
    (
        flock 9
        line=$(grep -m 1 "^$1|" "$out/queue.txt") || exit 0
        grep -vxF "$line" "$out/queue.txt" > "$out/queue.new"
        mv "$out/queue.new" "$out/queue.txt"
        echo "$line"
    ) 9> "$out/queue.lock"
}

run() { # NAME KIND CELLS MODEL PRECISION [ENGINE_ARGS], with the cores in $cores
    local name=$1 cells=$3 model=$4 precision=$5 arguments=${6:-}
    if [ "$cells" = sync ]; then
        flock "$out/turn.$name" taskset -c "$cores" $sync --model "$model" --precision "$precision" --steps 4 \
            --utilization 0.33 --engine-args "${arguments:-{\}}" --parts steps equal rollback \
            --output "$out/weight_sync.$name.jsonl"
    else
        flock "$out/turn.$name" taskset -c "$cores" $measure --cells "benchmarks/families/$cells.json" \
            --model "$model" --precision "$precision" --trace --timeout "${TIMEOUT:-600}" \
            --output "$out/$cells.$name.jsonl" --env VLLM_MOE_ROUTING_SIMULATION_STRATEGY=uniform_random
    fi
}

worker() { # KIND NAME
    local line fields
    while [ $SECONDS -lt "$last" ] && line=$(take "$1") && [ -n "$line" ]; do
        IFS='|' read -r -a fields <<< "$line"
        say "$2 begins $line"
        run "$2" "${fields[@]}" >> "$out/$2.log" 2>&1
        say "$2 ended $? $line"
    done
}

pair() { # KIND NAME FIRST CORES: two workers with half of the cores from FIRST on each
    local half=$((($4 + 1) / 2))
    (cores=$3-$(($3 + half - 1)); worker "$1" "$2") &
    sleep "${APART:-12}"
    (cores=$(($3 + $4 - half))-$(($3 + $4 - 1)); worker "$1" "$2")
    wait
}

mkdir -p "$out"
grep -v '^#' "$queue" > "$out/queue.txt"
{ nvidia-smi; python3 -m pip list 2> /dev/null | grep -iE 'torch|transformers|triton|einops|cuda|numpy|ninja'; nproc; } \
    > "$out/machine.txt" 2>&1
each=$(($(env -u OMP_NUM_THREADS nproc) / cards))
for card in $(seq 0 $((cards - 1))); do
    mkdir -p "$caches/$card"
    [ -n "${DEEP_GEMM:-}" ] && cp -r "$DEEP_GEMM/vllm" "$DEEP_GEMM/trtllm" "$caches/$card/"
done
if [ "$cards" -gt 1 ] && grep -q '^all|' "$out/queue.txt"; then
    (on "$(seq -s , 0 $((cards - 1)))"; pair all all 0 $((cards * each)))
fi
for card in $(seq 0 $((cards - 1))); do
    (on "$card"; pair one "g$card" $((card * each)) "$each") &
done
wait
say "no more jobs"
