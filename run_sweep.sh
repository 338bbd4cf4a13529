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
    if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then # no reason to install anything
        sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' run_sweep.sh
        echo "The settings are in docs/settings.md; once ./install.sh has run, --help lists them too."
        exit 0
    fi
    echo "$venv is not complete: running ./install.sh"
    ./install.sh --venv "$venv"
fi
exec "$venv/bin/python" -m harness.measure.sweep "$@"
