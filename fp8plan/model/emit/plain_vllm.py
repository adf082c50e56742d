"""A planned engine for programs that start vLLM themselves: its arguments as JSON, or the command of a server."""

from __future__ import annotations

import json

from fp8plan.model.emit.job import Job
from fp8plan.model.emit.notes import replicas_note, rollout_notes
from fp8plan.model.emit.spelling import with_comments
from fp8plan.model.emit.trainers import in_all_words
from fp8plan.model.emit.vllm import serve_command, vllm_env, vllm_kwargs
from fp8plan.model.shards import left_in_bf16


def emit_vllm(job: Job) -> str:
    """The settings as JSON {"engine_args", "env", "notes"}."""
    settings = {"engine_args": vllm_kwargs(job.setup), "env": vllm_env(job.setup), "notes": _notes(job)}
    return json.dumps(settings, indent=2)


def emit_vllm_serve(job: Job) -> str:
    """The shell command of a server, and notes as comments below it."""
    return with_comments(serve_command(vllm_kwargs(job.setup), vllm_env(job.setup)), _notes(job))


def _notes(job: Job) -> list[str]:
    setup, shape = job.setup, job.setup.known_shape
    notes = []
    if setup.limits.data_parallel_size > 1:
        notes.append(replicas_note(setup, "start this engine once per replica"))
    if shape is not None:
        notes.append(left_in_bf16(shape, setup.precision, setup.limits.tensor_parallel_size))
    return [
        *filter(None, notes),
        *rollout_notes(job),
        *(f"in the trainer: {words}" for words in in_all_words(setup.remedies)),
    ]
