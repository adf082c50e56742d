# For two GPUs: TRL's server mode; verl that trains on one and samples on the other. Kernels for `layouts` are compiled
# while TRL's first server starts, on the trainer's GPU: a server measures how much of its own is free.
. ~/lease.env
both() {
    kernels Qwen/Qwen3-0.6B # or the servers take over 300 s
    (
        renice -n 19 -p $BASHPID
        export CUDA_VISIBLE_DEVICES=0
        kernels Qwen/Qwen3-30B-A3B@2
    ) > ~/res/kernels.log 2>&1 &
    trl_server
    wait
    # What Ray and verl need of CuPy for NCCL, or why it is not there: verl says nothing.
    python3 -c "import torch, cupy; from cupy.cuda import nccl; print(cupy.__version__, nccl.get_version())
from ray.util.collective.collective import nccl_available; print(nccl_available())
import verl.checkpoint_engine as engines; print(engines.NCCLCheckpointEngine)"
    verl verl-async fp8plan --gpus 2 --mode separate_async --steps 8 --limit-s 620
    tail -qc 100000 /tmp/ray/session_latest/logs/worker*.err > ~/res/verl-async.err
    emptied
}
alone both
