#!/bin/bash
# What one card of a machine measured, in order; several cards of one machine run a lane each, at the same time.
#   lane.sh CARD CORES STEP...      CORES: as taskset takes them, so that lanes do not disturb each other's host
#   STEP: kernels:SCRIPT            a sweep of fp8plan.runtime.measure.kernels, its full grid, into kernels/
#         CELLS:MODEL[:WORKLOAD[;WORKLOAD...]]  rollouts of fp8plan/runtime/measure/cells/CELLS.json, into CELLS.gCARD.jsonl
# Caches are per card, so that a record can count what was compiled inside its run.
set -u
card=$1 cores=$2; shift 2
here=${OUTPUT:-$PWD/measured}; caches=${CACHES:-$PWD/caches}/$card
export CUDA_VISIBLE_DEVICES=$card VLLM_CACHE_ROOT=$caches/vllm TRITON_CACHE_DIR=$caches/triton
export TORCHINDUCTOR_CACHE_DIR=$caches/inductor TORCHINDUCTOR_COMPILE_THREADS=8 TRTLLM_DG_CACHE_DIR=$caches/trtllm
mkdir -p "$here/kernels" "$caches"
measure="taskset -c $cores python3 -m fp8plan.runtime.measure"
for step in "$@"; do
  IFS=: read -r what which workloads <<< "$step"
  only=(); IFS=';' read -ra names <<< "$workloads"; for name in "${names[@]}"; do only+=(--workload "$name"); done
  echo "== $(date +%T) $step"
  if [ "$what" = kernels ]; then
    case $which in gemm) jobs=(--compile 12) ;; moe) jobs=(--compile 4) ;; *) jobs=() ;; esac # each process takes GPU memory of its own
    $measure.kernels.$which --output "$here/kernels" "${jobs[@]}" ||
      $measure.kernels.$which --output "$here/kernels" # a broken CUDA context ends it; what is left goes on
  else
    $measure.rollouts.run --cells fp8plan/runtime/measure/cells/$what.json --model "$which" "${only[@]}" \
      --output "$here/$what.g$card.jsonl" --trace --timeout 600
  fi
done
echo "== $(date +%T) lane done"
