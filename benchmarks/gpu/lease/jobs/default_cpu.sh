# The runs of benchmarks.learning.verdict with the tiny policy, on the machine's CPU cores. It needs from ~/lease what
# cpu_bundle.sh made as cpu.0 ..., and no begin.sh. All runs begin with the committed policy. Those whose lines are
# committed are not made again. DEFAULT_AT_ONCE: runs at once, each on a core.
at_once=${DEFAULT_AT_ONCE:-$(($(nproc) - 4))}
tree=~/default.tree
mkdir -p ~/default/tiny-qk-norm ~/res "$tree"
cp -r benchmarks fp8plan profiles tests pyproject.toml "$tree" # later calls change the tree under a job that runs
cp -r benchmarks/learning/cpu/tiny-qk-norm/model ~/default/tiny-qk-norm
# The machine's memory grows while it is used, and an engine wants a free GiB when it starts.
python3 -c "b'1' * ($at_once * 1400 << 20)" &
cat ~/lease/cpu.*/part | tar -C ~ -I "xz -T0" -xf -
. ~/cpu/env.sh
cd "$tree" || exit
export PYTHONPATH=$tree:$tree/tests/cpu_kernels PYTHONUNBUFFERED=1 CUDA_VISIBLE_DEVICES= VLLM_HOST_IP=127.0.0.1
python3 -W ignore -m compileall -qq -j 0 ~/cpu/lib "$tree"
wait

keep() { # the records of runs, and the last lines of those that are not done
    python3 -m benchmarks.learning.keep ~/default/tiny-qk-norm ~/res/default_cpu.jsonl
    for run in ~/default/tiny-qk-norm/*/*/; do
        [ -e "$run/done.json" ] || tail -v -n 3 "$run/log.txt"
    done > ~/res/default_cpu.going
}
kept=benchmarks/learning/cpu/tiny-qk-norm/default.jsonl
for _ in 1 2 3; do # a run that failed goes on from its checkpoint
    python3 -m benchmarks.learning.run ~/default --policy tiny-qk-norm --device cpu --at-once "$at_once" \
        --first-seed 20 --seeds 32 --arms level-4-2 --kept $([ ! -e "$kept" ] || echo "$kept") && break
done &
while kill -0 $! 2> /dev/null; do
    sleep 20
    keep
done
keep # runs that ended meanwhile
