#!/usr/bin/env bash
# verl and Ray for a machine that has no registry: Python 3.12, Linux on x86-64, with torch, transformers, accelerate,
# peft, pandas and pyarrow, and vLLM beside it. 28 MB.
#     bash benchmarks/gpu/verl_bundle.sh FILE.tar.xz
#     there: tar -C DIR -xJf FILE.tar.xz && export PYTHONPATH=DIR/site, and a wheel of fp8plan, for its entry point
# Ray is pruned to tasks, actors and placement groups: without its dashboard's pages, RLlib, Serve and Java. With Python
# 3.12 it started and ran both; verl.trainer.main_ppo and verl's vLLM rollout imported there with transformers 5.17 and
# vLLM 0.26.0, though verl's metadata wants a transformers below 5.11.
set -euo pipefail
out=$(realpath -m "${1:?usage: verl_bundle.sh FILE.tar.xz}")
mkdir -p "$(dirname "$out")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
platforms=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
for minor in $(seq 39 -1 12) 5; do platforms+=(--platform "manylinux_2_${minor}_x86_64"); done
target=(--no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none)
target+=("${platforms[@]}")
python3 -m pip download -q "${target[@]}" -d "$work/wheels" verl==0.9.1 TransferQueue==0.1.10 tensordict==0.10.0 \
    torchdata==0.11.0 hydra-core==1.3.8 omegaconf==2.3.1 codetiming==1.4.0 datasets==5.2.0 multiprocess==0.70.19 \
    orjson==3.13.0 pyvers==0.1.0 importlib_metadata==10.2.0 ray==2.60.0 colorful smart_open aiohttp_cors opencensus \
    opencensus-context
python3 -m pip wheel -q --no-deps -w "$work/wheels" antlr4-python3-runtime==4.9.3 pylatexenc # these have no wheels
python3 -m pip install -q --no-index --no-compile "${target[@]}" --target "$work/site" "$work"/wheels/*.whl
cd "$work/site"
rm -rf tests ray/jars ray/rllib ray/serve ray/llm ray/cpp ray/dashboard/client
strip --strip-unneeded ray/_raylet.so ray/core/src/ray/raylet/raylet ray/core/src/ray/gcs/gcs_server
tar -C "$work" -cf - site | xz -T0 -6 > "$out"
ls -l "$out"
