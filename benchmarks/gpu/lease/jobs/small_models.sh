# For one GPU, the first or that of CUDA_VISIBLE_DEVICES: Gemma 3 270M and SmolLM2, both brought back from files of few
# bits. Probes in four precisions, Gemma's first, and then GRPO with Gemma: beside it two probes found no memory. It has
# not run in this order. Both at once took 12 minutes.
. ~/lease.env
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0} OMP_NUM_THREADS=1
unpacked learning gemma || exit 1
models=~/res/learning
python3 -m benchmarks.learning.policies smollm2 $models/smollm2/model &
python3 -m benchmarks.learning.policies gemma $models/gemma/model || exit 1
wait
kernels $models/{gemma,smollm2}/model

probe() { # NAME PRECISION: twice, as vLLM gives up if the engine before still frees memory
    local out=~/res/probe/$1/$2
    mkdir -p ~/res/probe/"$1"
    for _ in 1 2; do
        timeout 240 python3 -m fp8plan probe $models/"$1"/model --gpu "$(gpu)" --precision "$2" --json \
            --gpu-memory-utilization 0.25 > "$out.json" 2> "$out.log" && return
        sleep 5
    done
    echo "$1 in $2: no probe"
    tail -n 3 "$out.log"
}
for name in gemma smollm2; do
    for precision in bf16 fp8_kv fp8_block fp8_block+fp8_kv; do
        probe $name $precision
        echo "$name in $precision: probed after $SECONDS s"
    done
done
python3 -m benchmarks.learning.run $models --policy gemma --arms bf16 fp8 fp8-tis --seeds 2 --at-once 6 --memory 0.24 \
    --save-every 0 > ~/res/learn_gemma.log 2>&1
