#!/usr/bin/env bash
# The test command: installs the CPU stack into .venv-test if it is not there, then lint, shellcheck and all tests.
#
#   bash tests/run.sh                    everything that needs no GPU
#   bash tests/run.sh -m "not slow"      arguments go to pytest; -n 0 runs one test at a time
#
# Tests that need a GPU are marked gpu and skip with a reason; tests/gpu/run.sh runs them on a GPU box.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${TEST_VENV:-.venv-test}
./install.sh --venv "$venv" --force cpu
bin=$PWD/$venv/bin
[[ $venv != /* ]] || bin=$venv/bin
export PATH=$bin:$PATH DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES=""

ruff check .
ruff format --check .
shellcheck ./*.sh tests/*.sh tests/gpu/*.sh .ci/run
# Files side by side, in the order of tests/conftest.py: the long ones first.
exec python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 10 "$@"
