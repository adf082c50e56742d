#!/usr/bin/env bash
# New model families under vLLM with random weights: which start, with which kernels and cache, and how fast they are.
#     bash benchmarks/families.sh start FOLDER [QUEUE]        start a lane per GPU, which goes on by itself
#     bash benchmarks/families.sh wait FOLDER SECONDS TO      wait, then pack what there is into TO/families.tar.xz
# QUEUE (benchmarks/families/queue.txt) has a job a line, the most wanted first:
#     CELLS|MODEL|PRECISIONS|SECONDS OF AN ENGINE|plain or cute
# A lane takes the next line when it is free. `cute` puts CUTE (folders with nvidia-cutlass-dsl) on the PYTHONPATH;
# when such a job fails, the same line of triton.json goes to the head of the queue.
set -u
what=$1; out=$(realpath -m "$2"); shift 2
cd "$(dirname "$0")/.."
families=$PWD/benchmarks/families
measure=${MEASURE:-python3 -m fp8plan.runtime.measure.rollouts.run}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

next() { # the first line of the queue, which is gone then
    (
        flock 9
        head -n 1 "$out/queue.txt"
        sed -i 1d "$out/queue.txt"
    ) 9> "$out/queue.lock"
}

ahead() { # puts a line at the head of the queue
    (
        flock 9
        { echo "$1"; cat "$out/queue.txt"; } > "$out/queue.new"
        cp "$out/queue.new" "$out/queue.txt"
    ) 9> "$out/queue.lock"
}

lane() { # CARD CARDS: jobs until the queue is empty, on one card and its share of the cores
    local card=$1 each=$(($(env -u OMP_NUM_THREADS nproc) / $2)) cells model precisions seconds mode line words caches path name
    caches=${CACHES:-/tmp/families-caches}/$card
    export CUDA_VISIBLE_DEVICES=$card VLLM_CACHE_ROOT=$caches/vllm TRITON_CACHE_DIR=$caches/triton
    export TORCHINDUCTOR_CACHE_DIR=$caches/inductor TORCHINDUCTOR_COMPILE_THREADS=8 TRTLLM_DG_CACHE_DIR=$caches/trtllm
    mkdir -p "$caches"
    while line=$(next); [ -n "$line" ]; do
        IFS='|' read -r cells model precisions seconds mode <<< "$line"
        words=(); for name in ${precisions//,/ }; do words+=(--precision "$name"); done
        # A start is not timed; compiling every DeepGEMM kernel first would take minutes.
        [ "$cells" = starts ] && words+=(--env VLLM_DEEP_GEMM_WARMUP=skip)
        path=$PYTHONPATH; [ "$mode" = cute ] && path="$path:${CUTE:-}"
        echo "$(date +%T) card $card begins $line" >> "$out/jobs.txt"
        PYTHONPATH=$path taskset -c $((card * each))-$((card * each + each - 1)) \
            $measure --cells "$families/$cells.json" --output "$out/$cells.g$card.jsonl" --model "$model" \
            "${words[@]}" --trace --timeout "$seconds" >> "$out/lane$card.log" 2>&1
        status=$?
        echo "$(date +%T) card $card ended $status $line" >> "$out/jobs.txt"
        if [ $status -ne 0 ] && [ "$mode" = cute ]; then ahead "triton|$model|$precisions|$seconds|plain"; fi
    done
    echo "$(date +%T) card $card has no more jobs" >> "$out/jobs.txt"
}

start() {
    local cards=${CARDS:-$(nvidia-smi -L | wc -l)} card
    mkdir -p "$out"
    echo "$cards" > "$out/cards.txt"
    touch "$out/jobs.txt"
    grep -v '^#' "${1:-$families/queue.txt}" > "$out/queue.txt"
    { nvidia-smi; python3 -m pip list 2> /dev/null | grep -iE 'torch|transformers|triton|einops|cuda|numpy|ninja'; nproc; } \
        > "$out/machine.txt" 2>&1
    for card in $(seq 0 $((cards - 1))); do
        setsid bash "$0" lane "$out" "$card" "$cards" < /dev/null > /dev/null 2>&1 &
    done
    setsid python3 -m benchmarks.families.read_configs "$families/cells.json" > "$out/configs.txt" 2>&1 < /dev/null &
}

wait_and_pack() { # SECONDS TO
    local until=$((SECONDS + $1)) cards
    cards=$(cat "$out/cards.txt")
    while [ $SECONDS -lt $until ] && [ "$(grep -c 'no more jobs' "$out/jobs.txt")" -lt "$cards" ]; do sleep 1; done
    cat "$out/jobs.txt"
    tar -C "$out" -cJf "$2/families.tar.xz" .
    ls -l "$2/families.tar.xz"
}

case $what in
    start) start "$@" ;;
    lane) lane "$@" ;;
    wait) wait_and_pack "$@" ;;
    *) echo "$what is unknown; allowed: start, wait" >&2; exit 2 ;;
esac
