# Sourced by scripts/demo and scripts/test: a virtual environment with the versions of constraints.txt.
# Installs again only when pyproject.toml, the constraints or the extras change. $1: extras, such as [test].

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

find_python() {
    local name
    for name in "${PYTHON:-}" python3.11 python3.12 python3.13 python3; do
        if [ -n "$name" ] && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    echo "error: quantkit needs Python 3.11 or newer; set PYTHON to one" >&2
    return 2
}

# ensure_venv FOLDER CONSTRAINTS PIP_ARGUMENTS...: create FOLDER and install, unless that was done already.
ensure_venv() {
    local folder=$1 constraints=$2 stamp python
    shift 2
    stamp=$(cat pyproject.toml "$constraints" <(echo "$@") | sha256sum)
    if [ "$(cat "$folder/stamp" 2>/dev/null)" != "$stamp" ]; then
        python=$(find_python)
        echo "installing into $folder (once; a few minutes)" >&2
        [ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
        "$folder/bin/python" -m pip install -q --disable-pip-version-check -c "$constraints" torch
        "$folder/bin/python" -m pip install -q --disable-pip-version-check -c "$constraints" "$@"
        echo "$stamp" >"$folder/stamp"
    fi
}

# The client environment of tests/clients, which scripts read with, too.
ensure_clients() {
    ensure_venv .venv-clients constraints-clients.txt \
        transformers accelerate gptqmodel optimum compressed-tensors bitsandbytes
}

ensure_venv .venv constraints.txt -e ".${1:-}"
