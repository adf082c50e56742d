#!/usr/bin/env bash
# Install packages into an environment with uv, which takes a third of pip's time. uv does not read pip's settings, so
# they are handed over: on a machine without any, packages come from the usual index.
#     bash tools/install.sh ENVIRONMENT ARGUMENT...    arguments of `uv pip install`
set -euo pipefail
python=$1/bin/python
settings=$("$python" -m pip config list)
setting() { # NAME: its first value; the environment's come before those of files
    sed -n "s/^[^=]*\.$1='\(.*\)'$/\1/p" <<< "$settings" | head -1
}
export_if() { # VARIABLE VALUE
    [ -z "$2" ] || export "$1=$2"
}
export_if UV_DEFAULT_INDEX "$(setting index-url)"
export_if UV_INDEX "$(setting extra-index-url)"
export_if UV_FIND_LINKS "$(setting find-links)"
export_if UV_CONSTRAINT "$(setting constraint)"
export_if SSL_CERT_FILE "$(setting cert)"
export UV_INDEX_STRATEGY=unsafe-best-match UV_NO_CACHE=1
[ -x "$1/bin/uv" ] || "$python" -m pip --disable-pip-version-check -qq install uv==0.13.9
"$1/bin/uv" pip install --quiet --python "$python" "${@:2}"
