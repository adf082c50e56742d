# For one GPU, NEWS_GPU (3): the arms of benchmarks/learning/evidence/news.md that a candidate has to keep up with on a GPU,
# of the policy of 25M parameters. The first seed of every arm first. About 20 minutes.
. ~/lease.env
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=${NEWS_GPU:-3}
teach qk-norm
kernels benchmarks/learning/h200/shared/qk-norm
arms=(lasting-news lasting-tis lasting-tis-1.4 lasting-none)
python3 -m benchmarks.learning.run ~/res/learning --policy qk-norm --device cuda --at-once 6 --memory 0.3 --seeds 3 \
    --arms "${arms[@]}" "${arms[@]/lasting/broken}" --micro-tokens 8192
