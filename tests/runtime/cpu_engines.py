"""The environment of engines on a CPU that tests share. Imported before vLLM, which reads it once."""

import os

GPU = os.path.exists("/proc/driver/nvidia/version")
if not GPU:
    # One thread, bound to no core: threads of two test processes that share cores wait for each other, 20 times over.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # vLLM's quantiser says the same uncompiled, 5 s earlier in each process. On a GPU, tests compare it compiled, too.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; vLLM would take most of the machine's memory
    os.environ.setdefault("TRITON_INTERPRET", "1")  # our kernels run in Triton's interpreter
