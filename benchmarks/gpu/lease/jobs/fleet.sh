# For two GPUs: a fleet of one replica beside the trainer's GPU, synced over NCCL too; then of one over both GPUs. What
# two replicas do is in benchmarks/results/fleet_h100.jsonl: --replicas 2 --trainer cpu --parts rollout sync replace.
. ~/lease.env
fleet() {
    python3 -m benchmarks.gpu.fleet --model Qwen/Qwen3-4B --precision fp8_kv --gpu "$(gpu)" --mean 400 --longest 1500 \
        --output ~/res/fleet.jsonl --replicas 1 "$@"
}
both() {
    fleet --parts rollout copy sync nccl
    fleet --tensor-parallel 2 --trainer cpu --parts rollout sync
}
alone both
