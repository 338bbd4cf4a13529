#!/usr/bin/env bash
# The lines of harness/ that no test reaches on this machine: without a GPU, those that only tests/gpu runs.
#
#   bash tests/coverage.sh                     all tests, then the list
#   bash tests/coverage.sh -m "not slow"       arguments go to pytest
#
# Uses the environment that tests/run.sh made (TEST_VENV, or PYTHON=... for another interpreter). Ranks, launchers and
# scripts are counted too, but for what they did after a SIGKILL took them by surprise.
#
# What is left are the branches for a GPU, in these functions, and the checks of tests/gpu that run them:
#   attention._profiled                       test_operations::test_attention
#   box.device_facts, session.start           every launch
#   memory: synchronize, reset, peak_gib, alloc_retries, PhaseClock.mark       test_steps::test_step, test_phases
#   memory: current_gib, start_history, dump_history                           test_steps::test_out_of_memory
#   timing.iterations_ms                      test_operations::test_ceilings, test_attention_burst
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-${TEST_VENV:-.venv-test}/bin/python}
command -v "$python" >/dev/null || { echo "no $python: run bash tests/run.sh first" >&2; exit 2; }
COVERAGE_FILE=$(mktemp -d)/coverage
export COVERAGE_FILE DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES=""
trap 'rm -rf "${COVERAGE_FILE%/*}"' EXIT

status=0
"$python" -m coverage run -m pytest -q --numprocesses 2 --dist loadfile --no-loadscope-reorder "$@" || status=$?
"$python" -m coverage combine -q
"$python" -m coverage report -m --include='harness/*'
exit "$status"
