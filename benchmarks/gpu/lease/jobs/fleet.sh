# For two GPUs: a fleet of two replicas, with the trainer's weights on the host; then of one, synced over NCCL too.
. ~/lease.env
fleet() {
    python3 -m benchmarks.gpu.fleet --model Qwen/Qwen3-8B --output ~/res/fleet.jsonl "$@"
}
kernels Qwen/Qwen3-8B
fleet --replicas 2 --trainer cpu --parts rollout sync replace
fleet --replicas 1 --parts rollout copy sync nccl
