# For two GPUs: a fleet of two replicas, with the trainer's weights on the host; then of one, synced over NCCL too.
. ~/lease.env
fleet() {
    python3 -m benchmarks.gpu.fleet --model Qwen/Qwen3-4B --precision fp8_kv --gpu "$(gpu)" --mean 400 --longest 1500 \
        --output ~/res/fleet.jsonl "$@"
}
both() {
    fleet --replicas 2 --trainer cpu --parts rollout sync replace
    fleet --replicas 1 --parts rollout copy sync nccl
}
alone both
