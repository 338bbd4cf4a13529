#!/usr/bin/env bash
# Sweep a real DeepSpeed training step over sequence lengths: the main job, on a GPU box and without a GPU.
#
#   ./run_sweep.sh                                        all visible GPUs, 196608 tokens (no GPU: a tiny model, 2 ranks)
#   SEQLENS=guide ./run_sweep.sh                          8192 32768 65536 131072 196608 262144
#   SEQLENS="8192 32768" GPUS=4 STEPS=20 ./run_sweep.sh
#   ./run_sweep.sh --help                                 every setting, as variable or flag
#
# Installs .venv first if there is none (VENV=DIR for another). Results: results/<gpu>/sweep_<time>.jsonl and .log.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

venv=${VENV:-.venv}
if [[ ! -f $venv/installed ]]; then # written last: an interrupted installation goes on
    echo "$venv is not complete: running ./install.sh"
    ./install.sh --venv "$venv"
fi
exec "$venv/bin/python" -m harness.measure.sweep "$@"
