"""Weights from a trainer's GPU to the engine's workers over NCCL."""

from fp8plan.runtime.weight_sync.nccl.transfer import RemoteSource, Rendezvous, TrainerTransfer, connect

__all__ = ["RemoteSource", "Rendezvous", "TrainerTransfer", "connect"]
