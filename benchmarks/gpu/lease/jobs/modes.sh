# On the policy whose rollouts took longer than predicted: docs/evidence/trainers.md
. ~/lease.env
modes() {
    python3 -m benchmarks.learning.policies qk-norm ~/modes/qk-norm --device cuda
    python3 -m benchmarks.gpu.engine_modes ~/modes/qk-norm --output ~/res/engine_modes.jsonl
}
alone modes
