#!/usr/bin/env bash
# Proves the kernels and the device path on this machine's GPU with a prebuilt binary, and prints one table.
#
#   scripts/gpu-proof.sh FLASHD [cuda|hip|sim] [--no-bench] [--experts N]
#
# FLASHD is the binary; its kernels lie beside it, or where FLASHD_KERNELS says (`cargo xtask kernels` makes them). It needs bash
# and python3, no toolkit and no network. It exits with 1 when anything failed. The last step is the bench of the official shape
# with synthetic weights, 192 experts a layer unless told (112 GiB); --no-bench leaves it out.
set -euo pipefail
if [ $# -lt 1 ]; then
    sed -n '2,8p' "$0"
    exit 2
fi
exec python3 "$(dirname "$0")/gpu_proof.py" "$@"
