# For two GPUs, beside `first_card`: rollouts under several limits.
. ~/lease.env
lane 1
bash benchmarks/gpu/lease/jobs/limits.sh > ~/res/limits.log 2>&1
