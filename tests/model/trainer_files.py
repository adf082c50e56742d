"""Users' files with a trainer's configuration, which need neither trainer."""

from __future__ import annotations

# What a plan reads of a GRPOConfig, and a dataset without a length.
GRPO_CONFIG = """
from types import SimpleNamespace
args = SimpleNamespace(
    use_vllm=True, vllm_mode="colocate", vllm_tensor_parallel_size=1, vllm_max_model_length=None,
    vllm_gpu_memory_utilization=0.3, num_generations=8, per_device_train_batch_size=8, steps_per_generation=8,
    max_completion_length=64, chat_template_kwargs=None, use_liger_kernel=False,
)
dataset = iter(())
"""
# The part of verl's configuration that a plan reads.
VERL_CONFIG = """
data: {train_batch_size: 8, max_prompt_length: 64, max_response_length: 64}
algorithm: {}
reward: {reward_model: {enable: false}}
trainer: {n_gpus_per_node: 1, nnodes: 1, v1: {trainer_mode: sync}}
actor_rollout_ref:
  model: {path: Qwen/Qwen3-8B}
  actor: {strategy: fsdp}
  rollout: {name: vllm, n: 8, expert_parallel_size: 1, tensor_model_parallel_size: 1, gpu_memory_utilization: 0.5,
    max_model_len: null, max_num_seqs: 64, max_num_batched_tokens: 8192, enable_prefix_caching: true,
    enforce_eager: false, enable_rollout_routing_replay: false, checkpoint_engine: {backend: naive}}
"""
