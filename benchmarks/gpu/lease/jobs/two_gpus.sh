# For two GPUs: TRL's server mode; verl that trains on one and samples on the other; experts over both with FP8 weights;
# a fleet of two replicas. The kernels of the third are compiled while the first starts, on the trainer's GPU.
. ~/lease.env
kernels Qwen/Qwen3-0.6B # or the servers take over 300 s
(CUDA_VISIBLE_DEVICES=0 nice kernels Qwen/Qwen3-30B-A3B@2) > ~/res/kernels.log 2>&1 &
trl_server
wait
python3 -c "import verl.checkpoint_engine as engines; print(engines.NCCLCheckpointEngine)" # None: without CuPy
verl verl-async fp8plan --gpus 2 --mode separate_async --limit-s 650
python3 -m fp8plan.runtime.measure.rollouts.run --cells benchmarks/families/two_gpus.json --model Qwen/Qwen3-30B-A3B \
    --gpu "$(gpu)" --precision fp8_block+fp8_kv --trace --kernels --timeout 300 --output ~/res/two_gpus.jsonl \
    --env VLLM_MOE_ROUTING_SIMULATION_STRATEGY=uniform_random
python3 -m benchmarks.gpu.fleet --model Qwen/Qwen3-4B --precision fp8_kv --gpu "$(gpu)" --replicas 2 --trainer cpu \
    --parts rollout sync replace --mean 400 --longest 1500 --output ~/res/fleet.jsonl
