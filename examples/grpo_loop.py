"""GRPO in one file, on a CPU: vLLM samples with an FP8 KV cache, the trainer corrects for it, fp8plan watches.

    python examples/grpo_loop.py [run.jsonl]       about a minute; then: fp8plan monitor run.jsonl

The task is made up: a response is worth the share of its tokens that are even. The model starts random.
"""

import logging
import sys

import torch
import transformers
from apply_to_vllm import held_back, random_model, vllm

import fp8plan

PROMPTS, SAMPLES, LENGTH, STEPS, TEMPERATURE = 16, 16, 16, 10, 1.0


def main(run_file: str) -> None:
    folder = random_model()
    lengths = {"prompt_lengths": fp8plan.Fixed(8), "response_lengths": fp8plan.Fixed(LENGTH)}
    version = vllm.__version__.partition("+")[0]
    plan = fp8plan.plan(folder, "cpu", fp8plan.Workload(PROMPTS, SAMPLES, **lengths), engine_version=version)
    with held_back():
        engine = fp8plan.RolloutEngine.from_plan(plan, folder, choice="fp8_kv", skip_tokenizer_init=True)
        policy = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logging.getLogger("vllm").setLevel(logging.ERROR)  # from now on
    monitor = fp8plan.Monitor(plan=plan, engine=engine, sinks=[fp8plan.JsonLines(run_file)])

    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    chance = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        prompts = torch.randint(1024, (PROMPTS, 8), generator=chance).repeat_interleave(SAMPLES, 0)
        sampling = vllm.SamplingParams(
            temperature=TEMPERATURE, max_tokens=LENGTH, ignore_eos=True, logprobs=0, detokenize=False
        )
        outputs = engine.generate([{"prompt_token_ids": row} for row in prompts.tolist()], sampling)
        sampled = [output.outputs[0] for output in outputs]
        responses = torch.tensor([one.token_ids for one in sampled])
        rollout_logprobs = torch.tensor(
            [[at[token].logprob for token, at in zip(one.token_ids, one.logprobs, strict=True)] for one in sampled]
        )

        rewards = (responses % 2 == 0).float().mean(1).view(PROMPTS, SAMPLES)
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).view(-1, 1)
        logits = policy(torch.cat([prompts, responses], 1)).logits[:, prompts.shape[1] - 1 : -1] / TEMPERATURE
        train_logprobs = logits.log_softmax(-1).gather(-1, responses[..., None]).squeeze(-1)

        found = monitor.step(train_logprobs, rollout_logprobs, metrics={"critic/rewards/mean": rewards.mean()})
        loss = found.loss(-advantages * train_logprobs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        # Recalibrate or step down, should the guard advise it, or the KL be beyond repair; a sync must follow.
        engine.apply(found.verdict, found.decided.escalate)
        engine.sync_weights({name: tensor.bfloat16() for name, tensor in policy.state_dict().items()})
        print(
            f"step {step}: reward {rewards.mean():.3f}, KL {found.mismatch.k3:.1e}, C {found.thresholds.tis:.2f}, "
            f"{found.decided.decision}",
            flush=True,
        )
    monitor.close()
    engine.shutdown()


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["run.jsonl"]))
