"""A plan applied to the real vLLM, new weights every step: [FOLDER [GPU]]; without, a small random model on the CPU."""

import logging
import sys
import tempfile

import torch
import transformers

import fp8plan
from fp8plan.runtime.apply.engine.launch import held_back

with held_back():  # what vLLM writes until it runs; an exception names the file
    import vllm


def main(folder: str, gpu: str) -> None:
    workload = fp8plan.Workload(4, 4, prompt_lengths=fp8plan.Fixed(32), response_lengths=fp8plan.Fixed(32))
    plan = fp8plan.plan(folder, gpu, workload, engine_version=vllm.__version__.partition("+")[0])
    choice = "fp8_kv" if gpu == "cpu" else "fp8_block+fp8_kv"  # leave it out for the one that the plan chose
    with held_back():
        policy = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)  # what you train
        policy.to("cpu" if gpu == "cpu" else "cuda")
        engine = fp8plan.RolloutEngine.from_plan(plan, folder, choice=choice, skip_tokenizer_init=True)
    logging.getLogger("vllm").setLevel(logging.ERROR)  # from now on
    prompts = [{"prompt_token_ids": [7 * i + j for j in range(32)]} for i in range(16)]
    for step in range(3):
        outputs = engine.generate(prompts, vllm.SamplingParams(max_tokens=32, logprobs=0, seed=step, detokenize=False))
        with torch.no_grad():  # your optimiser
            policy.lm_head.weight.mul_(1.01)
        engine.apply(engine.verdict)  # recalibrates, or steps down if that is expected to be faster
        report = engine.sync_weights(policy.state_dict())
        print(f"step {step}: {outputs[0].outputs[0].token_ids[:6]}, then {report}", flush=True)
    engine.shutdown()


def random_model() -> str:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, tie_word_embeddings=False,
    )  # fmt: skip
    with held_back():
        transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder := tempfile.mkdtemp())
    return folder


if __name__ == "__main__":
    main(*(sys.argv[1:] or [random_model()]), *(["cpu"] if len(sys.argv) < 3 else []))
