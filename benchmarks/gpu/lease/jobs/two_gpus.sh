# For two GPUs: TRL's server mode; verl that trains on one and samples on the other.
. ~/lease.env
kernels Qwen/Qwen3-0.6B # or the servers take over 300 s
trl_server
python3 -c "import verl.checkpoint_engine as engines; print(engines.NCCLCheckpointEngine)" # None: without CuPy
verl verl-async fp8plan --gpus 2 --mode separate_async --limit-s 1100
