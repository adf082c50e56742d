"""TRL's OnlineDPOTrainer with a plan. It starts vLLM itself, and gets the engine of a VLLMGeneration in its place."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from trl.experimental.online_dpo import OnlineDPOTrainer as OfTrl
from trl.experimental.online_dpo import online_dpo_trainer

from fp8plan.errors import ConfigError
from fp8plan.integrations.trl.mixin import Planned


class OnlineDPOTrainer(Planned, OfTrl):
    """trl.experimental.online_dpo.OnlineDPOTrainer with a plan for its colocated engine.

    plan, choice, dry_run: as for Planned

    Raises the errors of Planned, and ConfigError for vllm_mode="server".
    """

    def _check_args(self, args: Any) -> None:
        super()._check_args(args)
        if args.vllm_mode != "colocate":
            raise ConfigError(
                f"plan is given, and vllm_mode is {args.vllm_mode!r}, for which OnlineDPOTrainer has a client of its "
                "own; allowed: 'colocate', or plan=None with a vllm serve that has fp8plan's backend"
            )

    def _generating(self) -> AbstractContextManager[Any]:
        return patch.object(online_dpo_trainer, "LLM", self._llm)

    def _llm(self, **of_trl: Any) -> Any:
        """The planned engine, for what TRL asks of a vllm.LLM."""
        args = self.args
        self.vllm_generation = self._generation(
            self.model,
            self.accelerator,
            self.processing_class,
            mode="colocate",
            gpu_memory_utilization=of_trl["gpu_memory_utilization"],
            max_model_length=of_trl["max_model_len"],
            max_num_seqs=self.num_generations * of_trl["max_num_seqs"],  # TRL's has the prompts
            enable_sleep_mode=of_trl["enable_sleep_mode"],
            model_impl=of_trl["model_impl"],
            max_completion_length=args.max_new_tokens,
        )
        return self.vllm_generation.llm

    def _generate_vllm(self, *args: Any, **kwargs: Any) -> Any:
        with self._rollout():
            return super()._generate_vllm(*args, **kwargs)

    def _move_model_to_vllm(self) -> None:
        if self.rollout_engine is None:
            super()._move_model_to_vllm()
        else:
            self.vllm_generation.sync_weights()
