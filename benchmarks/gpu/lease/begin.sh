#!/usr/bin/env bash
# On the GPU machine, once: unpack what pack.sh made and was copied to ~/lease, and write ~/lease.env.
set -euo pipefail
mkdir -p ~/res ~/fp8plan
cp -r * ~/fp8plan # later calls change the tree under a job that runs
tar -C ~ -I "xz -T0" -xf <(cat ~/lease/vllm.*/part) &
[ ! -e ~/lease/verl ] || tar -C ~/lease -xJf ~/lease/verl/verl.tar.xz &
for part in $(jobs -p); do wait "$part"; done
# A torch that was carried finds the machine's cuDNN, which may be older than it expects: attention in it then fails.
if [ -e ~/site/torch/__init__.py ]; then
    echo 'from torch.backends import cuda as _cuda; _cuda.enable_cudnn_sdp(False)' >> ~/site/torch/__init__.py
fi
for wheel in ~/lease/fp8plan/*.whl; do python3 -m zipfile -e "$wheel" ~/site; done # fp8plan's wheel has its entry points
touch ~/vllm.env
[ ! -e ~/lease/fp8plan/env.sh ] || cp ~/lease/fp8plan/env.sh ~/vllm.env
[ ! -e ~/lease/kernels ] || tar -C ~ -xzf <(cat ~/lease/kernels/*) # kernels that an earlier lease compiled
[ ! -e ~/lease/verl ] || cp -r ~/lease/site/. ~/site
if [ -e ~/lease/trl ]; then # apart: verl 0.9.1 builds no model beside TRL 1.16
    for wheel in ~/lease/trl/*.whl; do python3 -m zipfile -e "$wheel" ~/trl; done
fi

cat > ~/lease.env <<'EOF'
cd ~/fp8plan
. ~/vllm.env
export PYTHONPATH=$HOME/fp8plan:$HOME/site:$HOME/smol VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
export RAY_memory_monitor_refresh_ms=0 # the machine's memory grows while it is used, which Ray does not see
ended() { # JOB: wait until it has, if it was begun
    until [ ! -e ~/started/"$1" ] || [ -e ~/started/"$1"/ended ]; do sleep 1; done
}
alone() { # COMMAND...: after the jobs that were begun before this one and measure time
    local job
    while read -r job && [ "$job" != "$(basename "$0" .sh)" ]; do
        ! grep -q '^alone ' ~/started/"$job"/"$job".sh || ended "$job"
    done < ~/begun
    "$@"
}
kernels() { # MODEL[@RANKS]...: compile the FP8 kernels of those that have none yet
    local model todo=()
    for model in "$@"; do [ -e ~/compiled/"${model//\//.}" ] || todo+=("$model"); done
    [ ${#todo[@]} -gt 0 ] || return 0
    python3 -m fp8plan.runtime.measure.kernels.compile --models "${todo[@]}"
    mkdir -p ~/compiled
    for model in "${todo[@]}"; do touch ~/compiled/"${model//\//.}"; done
}
emptied() { # wait until what used the GPUs has gone
    for _ in $(seq 30); do
        nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | awk '$1 > 3000 { exit 1 }' && return
        sleep 2
    done
    nvidia-smi --query-compute-apps=pid,used_memory --format=csv
}
gpu() {
    nvidia-smi -L | grep -q H100 && echo h100_sxm || echo h200_sxm
}
host_loop() { # this host's loop, to ~/res/host_loops.jsonl
    python3 -m fp8plan doctor --host --json >> ~/res/host_loops.jsonl
}
unpacked() { # NAME...: of parts of wheels in ~/lease, which may have come after begin.sh
    local name
    for name in "$@"; do
        (
            flock 9
            [ ! -e ~/unpacked."$name" ] || exit 0
            cat ~/lease/"$name".*/part | tar -C ~ -xf - && touch ~/unpacked."$name"
        ) 9> ~/unpacked.lock || return
    done
}
teach() { # POLICY: of benchmarks/learning
    python3 -m benchmarks.learning.policies "$1" ~/res/learning/"$1"/model --device cuda
}
trl_server() {
    PYTHONPATH=$PYTHONPATH:$HOME/trl python3 -m benchmarks.gpu.trl_server --output ~/res/trl_server.jsonl \
        --deadline 400 --parts stock fp8plan --gpu "$(gpu)"
}
verl() { # NAME PART [OPTION...]
    python3 -m benchmarks.gpu.verl_grpo --model Qwen/Qwen3-0.6B --parts "$2" --output ~/res/verl_grpo."$1".jsonl \
        --folder ~/res/"$1" "${@:3}"
}
EOF
(. ~/lease.env && python3 -c "import vllm, fp8plan; print('vLLM', vllm.__version__)")
