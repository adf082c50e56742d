"""Score a trainer on the kept sets that vLLM returns, and compare with its log-probs over the whole vocabulary.

    python -m benchmarks.gpu.kept_set OUTPUT.jsonl       on a GPU with vLLM 0.28 or later

A small random model is sampled with top-k, top-p and min-p. vLLM returns the kept sets (`return_sampling_mask`, which
only its model runner V2 can). transformers has the same weights, so that any mismatch beyond kernel noise is the cut's.
Each row has the figures of a Monitor's step: `full` scores the whole vocabulary, `kept` the kept sets.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fp8plan import Monitor, Sampling, jsonl, kept_logprobs

# top_k is needed: vLLM returns no kept set without.
SAMPLED: tuple[dict[str, float], ...] = (
    {"top_k": 50}, {"top_k": 1000, "top_p": 0.8}, {"top_k": 1000, "min_p": 0.05},
    {"top_k": 200, "top_p": 0.9, "temperature": 0.7},
)  # fmt: skip
VOCABULARY, ROWS, TOKENS = 4096, 64, 128


def save_model(folder: str) -> None:
    """Save a random Qwen3 whose logits spread as those of a trained model do."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        head_dim=64, vocab_size=VOCABULARY, max_position_embeddings=1024, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(2.5 / (0.02 * 512**0.5))  # logits of standard deviation 2.5
    model.to(torch.bfloat16).save_pretrained(folder)


def step_of(full: Any, rollout: Any, sampling: Sampling) -> dict[str, Any]:
    """Figures of a Monitor's first step."""
    import torch

    step = Monitor(sampling=sampling).step(full, rollout, torch.ones(rollout.shape, dtype=torch.bool))
    mismatch = step.mismatch
    figures = {"k1": mismatch.k1, "k3": mismatch.k3, "mean_ratio": mismatch.mean_ratio, "tokens": mismatch.tokens}
    parts = [asdict(part) for part in step.attribution]
    return figures | {"alarms": [alarm.value for alarm in step.decided.alarms], "attribution": parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    output = parser.parse_args().output

    import torch
    import vllm
    from transformers import AutoModelForCausalLM
    from vllm import LLM, SamplingParams

    from fp8plan.runtime.measure.machine import machine_facts

    folder = tempfile.mkdtemp()
    save_model(folder)
    facts = {"date": jsonl.now(), "engine_version": vllm.__version__} | machine_facts()
    engine = LLM(
        model=folder, skip_tokenizer_init=True, return_sampling_mask=True, logprobs_mode="processed_logprobs",
        gpu_memory_utilization=0.3, max_model_len=512, enforce_eager=True,
    )  # fmt: skip
    trainer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda().eval()
    for number, cut in enumerate(SAMPLED):
        params = SamplingParams(
            n=ROWS, seed=number, max_tokens=TOKENS, ignore_eos=True, logprobs=0, detokenize=False, **cut
        )
        (answer,) = engine.generate([{"prompt_token_ids": list(range(1, 17))}], params, use_tqdm=False)
        rollout, full, kept = (torch.zeros(ROWS, TOKENS) for _ in range(3))
        sizes = []
        for row, completion in enumerate(answer.outputs):
            tokens = list(completion.token_ids)
            entries = zip(tokens, completion.logprobs, strict=True)
            rollout[row] = torch.tensor([entry[token].logprob for token, entry in entries])
            with torch.inference_mode():
                logits = trainer(torch.tensor([[*range(1, 17), *tokens]], device="cuda")).logits[0, 15:-1]
            logits = logits.float().cpu() / cut.get("temperature", 1.0)
            ids = torch.tensor(tokens)
            full[row] = logits.log_softmax(-1).gather(1, ids[:, None]).squeeze(1)
            kept[row] = kept_logprobs(logits, ids, completion.sampling_mask)
            sizes += [len(ids) for ids in completion.sampling_mask.token_ids]
        row_of = {"cut": cut, "kept_tokens_mean": sum(sizes) / len(sizes)} | facts
        temperature = cut.get("temperature", 1.0)
        plain = Sampling.of(params, trainer_temperature=temperature)
        scored = Sampling.of(params, trainer_temperature=temperature, kept_set=True)
        assert plain is not None
        assert scored is not None
        for name, logprobs, sampling in (("full", full, plain), ("kept", kept, scored)):
            with output.open("ab") as file:
                file.write(jsonl.line({"scored": name} | step_of(logprobs, rollout, sampling) | row_of))


if __name__ == "__main__":
    main()
