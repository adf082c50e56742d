#!/usr/bin/env bash
# On the GPU machine, once: unpack what pack.sh made and was copied to ~/lease, and write ~/lease.env.
set -euo pipefail
mkdir -p ~/res ~/fp8plan
cp -r benchmarks fp8plan profiles pyproject.toml ~/fp8plan # later calls change the tree under a job that runs
cat ~/lease/[0-3]/part | tar -C ~ -xJf - &
tar -C ~/lease -xJf ~/lease/4/verl.tar.xz &
if [ -e ~/lease/5 ]; then tar -C ~ -xJf ~/lease/5/cupy.tar.xz & fi # for verl's separate_async alone
if [ -e ~/lease/6 ]; then cat ~/lease/[6-9]/part | tar -C ~ -xf - & fi # SmolLM2, for jobs/policies.sh alone
for part in $(jobs -p); do wait "$part"; done
cp -r ~/lease/site/. ~/site
python3 -m zipfile -e ~/lease/4/fp8plan-*.whl ~/site # for its entry points
[ ! -e ~/lease/4/deep_gemm.tgz ] || tar -C ~ -xzf ~/lease/4/deep_gemm.tgz # kernels of an earlier lease
python3 -m zipfile -e ~/lease/4/trl-*.whl ~/trl # apart: verl 0.9.1 builds no model beside TRL 1.16

cat > ~/lease.env <<'EOF'
cd ~/fp8plan
export PYTHONPATH=$HOME/fp8plan:$HOME/site:$HOME/smol VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
alone() { # COMMAND...: after the other jobs that measure time, and with what learns stopped; in a lane, at once
    [ -z "${LANES:-}" ] || { "$@"; return; }
    (
        flock 9
        learners STOP
        "$@"
        learners CONT
    ) 9> ~/alone.lock
}
learners() { # SIGNAL: to the process groups of the jobs that learn
    for job in learning policies; do
        [ ! -e ~/started/$job/group ] || kill -"$1" -- -"$(cat ~/started/$job/group)" 2> /dev/null
    done
}
EOF
(. ~/lease.env && python3 -c "import vllm, verl, fp8plan; print('vLLM', vllm.__version__)")
