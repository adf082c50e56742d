# For one GPU: the mismatch of SmolLM2 and Gemma 3 270M with K and V scales of 1.0 on FlashInfer, and with measured ones
# on FlashAttention and Triton. Three probes at a time.
. ~/lease.env
export OMP_NUM_THREADS=2
unpacked learning gemma || exit 1
models=~/res/learning
for name in smollm2 gemma; do
    python3 -m benchmarks.learning.policies $name $models/$name/model &
done
wait

probe() { # NAME PRECISION KERNEL SCALES: twice, as vLLM gives up if the engine before still frees memory
    local out=~/res/probe/$1/$2.$4.$3
    mkdir -p ~/res/probe/"$1"
    for _ in 1 2; do
        timeout 300 python3 -m fp8plan probe ~/res/learning/"$1"/model --precision "$2" --json --samples 8 \
            --max-tokens 384 --gpu-memory-utilization 0.2 --attention-backend "$3" --kv-scales "$4" \
            > "$out.json" 2> "$out.log" && break
        sleep 5
    done
    echo "$out after $SECONDS s"
}
export -f probe
{
    for name in smollm2 gemma; do
        for precision in fp8_kv fp8_block+fp8_kv; do
            echo $name $precision FLASHINFER unit
            echo $name $precision FLASH_ATTN calibrated
        done
        echo $name fp8_kv TRITON_ATTN calibrated
        echo $name fp8_kv FLASH_ATTN unit
    done
} | xargs -P 3 -L 1 bash -c 'probe "$@"' _
