#!/usr/bin/env bash
# The checks that only a GPU can run. One GPU of 40 GiB or more should be enough; neither that nor how long it takes
# has been seen on a GPU yet.
#
#   bash tests/gpu/run.sh                  with .venv as ./install.sh made it (VENV=DIR for another)
#   bash tests/gpu/run.sh --system         with this box's own python3 and packages as they are; PYTHONPATH counts, so
#                                          carried wheels do. What is absent is named, and the checks it leaves out
#   bash tests/gpu/run.sh --rehearse       no GPU: what of it a CPU can do, with a tiny model, to test the suite itself
#   bash tests/gpu/run.sh -k attention     further arguments go to pytest
#
# PYTHON=... names another interpreter. The first visible GPU is used. Ends with one table: check, figure, holds or not.
# exit codes: 0 every check that ran holds; 1 one does not; 2 wrong use, or a package without which nothing runs;
# 77 skipped: there is no GPU here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

mode=venv what=run
while true; do
    case ${1-} in
        --help | -h) sed -n '2,/^\(set\|exec\) /s/^# \{0,1\}//p' "tests/gpu/$what.sh"; exit 0 ;;
        --system | --rehearse) mode=${1#--} ;;
        --first-look) what=first_look ;;
        *) break ;;
    esac
    shift
done

if [[ $mode == rehearse ]]; then
    export DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES=""
else
    export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-0}
    CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES%%,*}
    if [[ -z ${CUDA_VISIBLE_DEVICES#-1} || ${DS_ACCELERATOR-} == cpu ]]; then
        why="CUDA_VISIBLE_DEVICES or DS_ACCELERATOR hides it"
    elif nvidia-smi -L 2>/dev/null | grep "^GPU " >/dev/null || compgen -G "/dev/nvidia[0-9]*" >/dev/null; then
        why=""
    else
        why="nvidia-smi lists none"
    fi
    if [[ -n $why ]]; then
        echo "skipped: these checks need an NVIDIA GPU and there is none here ($why)"
        [[ $what == run ]] || { echo "on one they would be:" && "${PYTHON:-python3}" -m tests.gpu.first_look --plan; }
        exit 77
    fi
fi

python=${PYTHON:-${VENV:-.venv}/bin/python}
[[ $mode == venv ]] || python=${PYTHON:-python3}
if ! command -v "$python" >/dev/null; then
    echo "no $python: run ./install.sh, or use --system for this box's own python3" >&2
    exit 2
fi
"$python" - <<'PYTHON'
import importlib.util, sys

needed = "pytest rich pydantic pydantic_settings numpy scipy psutil pynvml torch transformers triton".split()
missing = [name for name in needed if importlib.util.find_spec(name) is None]
if missing:
    print(f"{sys.executable} lacks {', '.join(missing)}, without which no check runs", file=sys.stderr)
    sys.exit(2)
PYTHON
export GPU_SUITE=$mode
[[ $what == run ]] || exec "$python" -m tests.gpu.first_look "$@"
"$python" -m pytest tests/gpu -q -p no:cacheprovider --tb=short --show-capture=no -r "" "$@" || exit $(($? > 1 ? 2 : 1))
