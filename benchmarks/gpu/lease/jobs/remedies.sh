# For one GPU, the first or that of CUDA_VISIBLE_DEVICES: the mismatch of the policy with experts, of SmolLM2 and of Gemma
# 3 270M, with and without remedies, in four precisions. Small models are probed while the policy with experts is taught.
# AT_ONCE probes share the GPU. About 8 minutes, if kernels were compiled before. It has not run in this order.
. ~/lease.env
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0} OMP_NUM_THREADS=1
unpacked learning gemma || exit 1
at_once=${AT_ONCE:-6} models=~/res/learning out=~/res/remedies
mkdir -p $out

probe() { # NAME PRECISION: twice, as a start may fail while other engines take and free memory
    local to=$out/$1/$2
    mkdir -p "$out/$1"
    for _ in 1 2; do
        [ ! -e "$to.json" ] || mv "$to.json" "$to.first.json" # of a try that found a part
        timeout 420 python3 -m benchmarks.gpu.remedies $models/"$1"/model --policy "$1" --precision "$2" --gpu "$(gpu)" \
            --output "$to.json" >> "$to.log" 2>&1 && echo "$1 in $2: probed after $SECONDS s" && return
        sleep 5
    done
    echo "$1 in $2: no probe, or not all of it"
    tail -n 3 "$to.log"
}
probes() { # NAME: in all precisions, the longest first
    local precision
    for precision in fp8_block+fp8_kv fp8_block fp8_kv bf16; do
        while [ "$(jobs -rp | wc -l)" -ge "$at_once" ]; do wait -n; done
        probe "$1" $precision &
    done
}
teach moe > $out/teach.log 2>&1 &
taught=$!
python3 -m benchmarks.learning.policies smollm2 $models/smollm2/model &
smollm2=$!
python3 -m benchmarks.learning.policies gemma $models/gemma/model || exit 1
wait $smollm2 || exit 1
kernels $models/{gemma,smollm2}/model benchmarks/learning/gpus/shapes/moe
echo "small models written after $SECONDS s"
probes smollm2
probes gemma
while kill -0 $taught 2> /dev/null; do sleep 1; done
[ -e $models/moe/model/training.json ] || exit 1
echo "the policy with experts taught after $SECONDS s"
probes moe
wait
