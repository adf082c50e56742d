# For two GPUs, beside `second_card`: the GPU tests, levers, and rollouts of `native_h200`. Their logs are those of the jobs.
. ~/lease.env
lane 0
for job in gpu_tests levers native_h200; do
    bash benchmarks/gpu/lease/jobs/$job.sh > ~/res/$job.log 2>&1
done
