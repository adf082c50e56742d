"""The choice of a rollout precision: twenty lines from a model, a GPU and a workload to an answer."""

import fp8plan

workload = fp8plan.Workload(
    prompts=32,
    samples_per_prompt=16,
    prompt_lengths=fp8plan.Fixed(1024),
    response_lengths=fp8plan.LogNormal(mean=6000, sigma=0.9, max=20480),
)
# What the rest of the RL step takes, if you know it: the speed-up of the whole step follows.
trainer = fp8plan.StepTimes(train_s=180, logprob_s=60)

plan = fp8plan.plan("Qwen/Qwen3-8B", "h200", workload, trainer=trainer)
# On a laptop: fp8plan.plan("fp8plan/dense-50m", "cpu", workload, trainer=trainer, engine_version="0.30.0")

for choice in (choice for choice in plan.choices if choice.available):
    print(
        f"{choice.precision:18} rollout {choice.makespan_s:5.0f} s {choice.gain.cell}, "
        f"step {choice.rl_step_s:5.0f} s {choice.step_gain.cell}, KL {choice.kl_k3:.1e}, risk {choice.risk}"
    )
print(*plan.reasons, sep="\n")
print(plan.vllm_kwargs())
