#!/usr/bin/env bash
# One matched software stack for this box, in its own virtual environment. Nothing outside it is touched.
#
#   ./install.sh                              detect the GPU, check the box, install, verify
#   ./install.sh --plan                       print the choices and the checks, install nothing
#   ./install.sh --force fa4                  fa3, fa4, sdpa or cpu instead of the GPU's own choice
#   ./install.sh --torch 2.12.1 --cuda cu126  another torch in a venv of its own, to compare stacks on one GPU
#   ./install.sh --stack requirements/latest.txt --venv .venv-latest
#
# Options: --venv DIR (default .venv), --no-preflight (failed checks only warn).
# Attention by compute capability: 9.x FlashAttention-3, 10.x FlashAttention-4, others PyTorch's own (sdpa).
# Environment: PYTHON (interpreter, 3.11 or later), CUDA_HOME, HF_HOME, DATA_FAST (fast local disk that the model is
#   copied to), MODEL_ID (default meta-llama/Llama-3.1-8B), TORCH_INDEX (a mirror of PyTorch's wheel index).
# Run it again at any time: a finished installation is left as it is, an interrupted one goes on.
# Exit codes: 0 done; 1 the installation failed (the reason is the last line); 2 wrong use; 130 interrupted.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
TORCH_INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl} MODEL_ID=${MODEL_ID:-meta-llama/Llama-3.1-8B}
VENV="" FORCE="" TORCH="" CUDA="" STACK=$ROOT/requirements/pinned.txt PLAN=0 PREFLIGHT=1 PROBLEMS=0

say() { printf '%s\n' "$*"; }
warn() { printf 'warning: %s\n' "$*" >&2; }
fail() { printf 'error: %s\n' "$*" >&2 && exit 1; }
wrong() { printf 'wrong use: %s (see --help)\n' "$*" >&2 && exit 2; }
field() { printf '%-11s %s\n' "$1" "$2"; }
trap 'printf "\ninterrupted: run ./install.sh again, it goes on from here\n" >&2; exit 130' INT TERM

while (($#)); do
  case $1 in
  -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}" && exit 0 ;;
  --plan | --dry-run) PLAN=1 && shift ;;
  --no-preflight) PREFLIGHT=0 && shift ;;
  --venv | --force | --torch | --cuda | --stack)
    [[ -n ${2:-} ]] || wrong "$1 needs a value"
    case $1 in --venv) VENV=$2 ;; --force) FORCE=$2 ;; --torch) TORCH=$2 ;; --cuda) CUDA=$2 ;; --stack) STACK=$2 ;; esac
    shift 2 ;;
  *) wrong "unknown option $1" ;;
  esac
done
[[ $FORCE =~ ^(fa3|fa4|sdpa|cpu)?$ ]] || wrong "--force $FORCE: fa3, fa4, sdpa or cpu"
[[ $CUDA =~ ^(cu[0-9]{3}|cpu)?$ ]] || wrong "--cuda $CUDA: a tag such as cu130, or cpu"
[[ ${TORCH:+set} == "${CUDA:+set}" ]] || wrong "--torch and --cuda go together"
[[ -f $STACK ]] || wrong "--stack $STACK: no such file"
STACK=$(realpath "$STACK")
VENV=$(realpath -m "${VENV:-$ROOT/.venv${TORCH:+-torch$TORCH-$CUDA}}")
OTHER_TORCH=$TORCH
pin() { sed -n "s/^$1==//p" "$STACK"; }

# ---- what this box is, and what follows ------------------------------------------------------------------------------
# Sets CAPABILITY ("9.0", empty without a GPU) and GPU (a line to print). No torch is needed for it.
detect_gpu() {
  CAPABILITY="" GPU="none"
  if [[ $FORCE == cpu ]] || ! command -v nvidia-smi >/dev/null; then return; fi
  local out kinds
  if ! out=$(nvidia-smi --query-gpu=compute_cap,name --format=csv,noheader 2>&1) || ! [[ $out =~ ^[0-9]+\.[0-9]+, ]]; then
    compgen -G '/dev/nvidia[0-9]*' >/dev/null && fail "nvidia-smi fails (${out%%$'\n'*}): repair the driver, or --force cpu"
    warn "nvidia-smi is here but finds no GPU (${out%%$'\n'*}): installing for the CPU" && return
  fi
  kinds=$(cut -d, -f1 <<<"$out" | sort -u)
  GPU="$(wc -l <<<"$out") x $(cut -d, -f2- <<<"$out" | sed 's/^ *//' | sort -u | paste -sd/) (compute capability ${kinds//$'\n'/, })"
  [[ -n $FORCE || $kinds != *$'\n'* ]] ||
    fail "GPUs of different kinds, $GPU: one stack fits one kind; choose with --force fa3, fa4 or sdpa"
  local wanted=${FORCE/fa3/9.} && wanted=${wanted/fa4/10.}
  CAPABILITY=$(grep -m1 -F "$wanted" <<<"$kinds" || head -n1 <<<"$kinds")
}

# Sets BACKEND, WHY, TORCH and CUDA. The same rule as harness/measure/attention.py; a test holds them together.
choose() {
  local major=${CAPABILITY%%.*}
  BACKEND=sdpa WHY="PyTorch's own attention"
  case ${FORCE:-auto$major} in
  fa3 | auto9) BACKEND=fa3 WHY="FlashAttention-3 $(pin flash-attn-3)" ;;
  fa4 | auto10) BACKEND=fa4 WHY="FlashAttention-4 $(pin flash-attn-4)" ;;
  cpu | auto) WHY+=", no GPU used" ;;
  sdpa) WHY+=", as asked" ;;
  *) WHY+=": FlashAttention-3 needs compute capability 9.x, FlashAttention-4 10.x" ;;
  esac
  case $BACKEND$major in
  fa3[89] | fa49 | fa410 | sdpa*) ;;
  fa3 | fa4) fail "--force $BACKEND: there is no NVIDIA GPU here" ;;
  *) fail "--force $BACKEND: it cannot train on compute capability $CAPABILITY; use --force sdpa" ;;
  esac
  [[ $(pin cuda-toolkit) =~ ^([0-9]+)\.([0-9]+) ]] || fail "$STACK pins no cuda-toolkit"
  CUDA=${CUDA:-cu${BASH_REMATCH[1]}${BASH_REMATCH[2]}} TORCH=${TORCH:-$(pin torch)} # 13.0.3 -> cu130
  [[ -n $major ]] || CUDA=cpu
}

find_python() {
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      PYTHON=$(command -v "$candidate") && return
    fi
  done
  fail "no Python 3.11 or later (tried ${PYTHON:-python3, python3.13, python3.12, python3.11}): install one, or PYTHON=/path/to/python3"
}

# ---- preflight: what would fail after the large download -------------------------------------------------------------
problem() { PROBLEMS=$((PROBLEMS + 1)) && printf 'problem: %s\n' "$*" >&2; }
kib() { df -Pk "$1" 2>/dev/null | awk -v column="$2" 'NR == 2 {print $column}' || true; } # 2 size, 4 free

preflight() {
  local need=4 free place=$VENV include
  [[ $CUDA == cpu ]] || need=14
  while [[ ! -d $place ]]; do place=$(dirname "$place"); done
  free=$(kib "$place" 4)
  ((${free:-0} >= need * 1000000)) ||
    problem "$((${free:-0} / 1000000)) GB free for $VENV, about $need GB needed: make room, or --venv DIR on a larger disk"
  "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
    problem "$PYTHON cannot make virtual environments: install its venv package (Debian, Ubuntu: python3-venv)"
  include=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("include"))')
  [[ -f $include/Python.h ]] || problem "no Python.h for $PYTHON: install its headers (Debian, Ubuntu: python3-dev)"
  command -v "${CXX:-g++}" >/dev/null ||
    problem "no C++ compiler: DeepSpeed compiles its CPU Adam and communication ops; install g++ (build-essential)"
  free=$(kib /dev/shm 2)
  ((${free:-0} >= 1048576)) ||
    warn "/dev/shm has $((${free:-0} / 1024)) MiB: NCCL and gloo need about 1 GiB; start the container with --shm-size=16g"
  [[ $CUDA == cpu ]] || preflight_gpu
  ((PROBLEMS == 0)) && return
  ((PREFLIGHT)) && fail "$PROBLEMS of the checks failed, nothing was installed (--no-preflight goes on all the same)"
  warn "$PROBLEMS of the checks failed; going on as asked"
}

preflight_gpu() {
  local nvcc have want=${CUDA:2:2}.${CUDA:4} driver least=580 ram limit
  # The order in which torch, and with it DeepSpeed, looks for the toolkit.
  nvcc=${CUDA_HOME:-${CUDA_PATH:-}} && nvcc=${nvcc:+$nvcc/bin/nvcc}
  nvcc=${nvcc:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
  have=$("$nvcc" --version 2>/dev/null | sed -n 's/.*release \([0-9]*\.[0-9]*\).*/\1/p' || true)
  if [[ -z $have ]]; then
    problem "CUDA toolkit missing ($nvcc does not run): DeepSpeed cannot build or even import; install CUDA $want and export CUDA_HOME"
  elif [[ $have != "$want" && ${DS_SKIP_CUDA_CHECK:-0} != 1 ]] && [[ ${want%.*} == 13 || ${have%.*} != "${want%.*}" ]]; then
    problem "nvcc is CUDA $have, torch is built for $want and DeepSpeed refuses to mix them: export CUDA_HOME=/usr/local/cuda-$want (install it if need be), or export DS_SKIP_CUDA_CHECK=1 to risk it"
  fi
  driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | sed -n 1p || true)
  [[ $want != 12.* ]] || least=525
  [[ ${driver%%.*} =~ ^[0-9]+$ ]] || driver=0
  ((${driver%%.*} >= least)) ||
    problem "driver ${driver/#0/unknown}, CUDA $want needs $least or later: update it, or take an older stack (--torch $TORCH --cuda cu126)"
  [[ $want != 13.* ]] || ((${CAPABILITY/./} >= 75)) ||
    problem "CUDA 13 has no code for compute capability $CAPABILITY: --torch $TORCH --cuda cu126"
  # 8e9 parameters x 16 bytes (fp32 master, gradient and two Adam states) are 128 GB, and loading needs room.
  ram=$(($(getconf _PHYS_PAGES) * $(getconf PAGE_SIZE) / 1000000000))
  limit=$(cat /sys/fs/cgroup/memory.max 2>/dev/null || echo max)
  [[ $limit == max ]] || ((limit / 1000000000 >= ram)) || ram=$((limit / 1000000000))
  ((ram >= 160)) ||
    warn "$ram GB of host memory: offloading an 8B model's optimizer takes about 160 GB; use OFFLOAD_OPTIMIZER=0, NUM_LAYERS or a smaller MODEL"
}

# ---- installing ------------------------------------------------------------------------------------------------------
step() { say "" && say "[$1/5] $2"; }
pip_install() { "$VENV/bin/python" -m pip install --no-input --disable-pip-version-check --timeout 60 "$@"; }

make_venv() {
  [[ -z $(ls -A "$VENV" 2>/dev/null) || -f $VENV/pyvenv.cfg || -f $VENV/install.lock ]] ||
    wrong "--venv $VENV: a folder with other things in it"
  mkdir -p "$VENV" 2>/dev/null || fail "$VENV cannot be written"
  exec 9>"$VENV/install.lock"
  ! command -v flock >/dev/null || flock -n 9 || fail "another ./install.sh is at work on $VENV"
  rm -f "$VENV/installed"
  usable_venv && return
  rm -rf "${VENV:?}"/{bin,lib,lib64,include,pyvenv.cfg} # a half-made one
  "$PYTHON" -m venv "$VENV" || fail "$PYTHON could not make a virtual environment in $VENV"
}
usable_venv() { "$VENV/bin/python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

# torch must be the one asked for, and on a GPU box a CUDA build: any later install may quietly replace it.
check_torch() {
  "$VENV/bin/python" - "$TORCH" "$CUDA" <<'PYTHON' || fail "after installing $1, torch is not the one asked for"
import sys, torch
want, tag = sys.argv[1:]
cuda = (torch.version.cuda or "").replace(".", "")
if torch.__version__.split("+")[0] != want or (tag != "cpu" and f"cu{cuda}" != tag):
    sys.exit(f"torch {torch.__version__} with CUDA {torch.version.cuda} is installed; {want} with {tag} was asked for")
PYTHON
}

install_packages() {
  local constraints=$VENV/constraints.txt extra=() index=()
  cp "$STACK" "$constraints"
  if [[ -n $OTHER_TORCH ]]; then # its own CUDA libraries and triton come with it
    grep -vE '^(torch|triton|setuptools|cuda-[a-z]+|nvidia-([a-z0-9]+|[a-z]+-cu13|cuda-[a-z]+))==' "$STACK" >"$constraints"
    say "torch==$OTHER_TORCH" >>"$constraints"
  fi
  case $BACKEND in
  fa3) extra=(einops) ;; # the one dependency of FlashAttention-3 that the stack does not have anyway
  fa4) extra=("flash-attn-4$([[ $CUDA != cu13* ]] || echo '[cu13]')") ;;
  esac
  # PyTorch's own index has the build for exactly this CUDA, or none of it; asked once here, as pip would try for minutes.
  if "$VENV/bin/python" -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=10)' "$TORCH_INDEX/$CUDA/" 2>/dev/null; then
    index=(--extra-index-url "$TORCH_INDEX/$CUDA")
  else
    warn "$TORCH_INDEX/$CUDA cannot be reached: taking torch from where pip looks by default"
  fi
  # One resolver call with torch pinned: deepspeed and liger-kernel do not bound torch, so a later one could move it.
  pip_install "${index[@]}" -c "$constraints" -r "$ROOT/requirements/train.txt" "${extra[@]}" ||
    fail "pip could not install the packages (its reason is above); run ./install.sh again, downloads are kept"
  check_torch "the packages"
  [[ $BACKEND == fa3 ]] || return 0
  local folder=$CUDA && [[ $CUDA != cu13* ]] || folder=cu130 # one build for all of CUDA 13
  pip_install --no-deps --index-url "$TORCH_INDEX/$folder" "flash-attn-3==$(pin flash-attn-3)" ||
    fail "FlashAttention-3 could not be installed from $TORCH_INDEX/$folder; --force sdpa does without it"
  check_torch "FlashAttention-3"
}

# A model in the Hugging Face cache is copied to fast local disk once, whole or not at all.
stage_model() {
  [[ $CUDA != cpu ]] || { say "without a GPU a tiny model is made on the fly" && return; }
  local cache=${HF_HUB_CACHE:-${HF_HOME:-$HOME/.cache/huggingface}/hub} target=${DATA_FAST:-}/$MODEL_ID snapshot shards
  snapshot=$(find "$cache/models--${MODEL_ID//\//--}/snapshots" -mindepth 2 -maxdepth 2 -name config.json 2>/dev/null | sed -n 1p || true)
  snapshot=${snapshot%/config.json}
  # An interrupted download leaves links to nothing (-L), and the names say how many shards there must be.
  shards=$(find -L "${snapshot:-/dev/null}" -maxdepth 1 -type f -name '*.safetensors')
  if [[ -n ${DATA_FAST:-} && -d $target ]]; then
    say "$MODEL_ID is in $target"
  elif [[ -z $shards ]] || [[ $shards =~ -of-0*([0-9]+)\. && $(wc -l <<<"$shards") != "${BASH_REMATCH[1]}" ]]; then
    say "$MODEL_ID is not (all) in the Hugging Face cache, so random weights of its shape will be used. For the real ones:
  $VENV/bin/hf download $MODEL_ID && ./install.sh"
  elif [[ -z ${DATA_FAST:-} ]]; then
    say "$MODEL_ID is in the Hugging Face cache; set DATA_FAST to a folder on fast local disk to have it copied there"
  else
    say "copying $MODEL_ID to $target ($(du -shL "$snapshot" | cut -f1))"
    rm -rf "$target.part"
    if ! mkdir -p "$(dirname "$target")" || ! cp -rL "$snapshot" "$target.part" || ! mv "$target.part" "$target"; then
      rm -rf "$target.part"
      fail "$MODEL_ID could not be copied to $target: is there room?"
    fi
  fi
}

main() {
  cd "$ROOT"
  unset PIP_USER PIP_TARGET PIP_PREFIX PYTHONHOME PYTHONPATH # by these pip would write, and Python read, elsewhere
  export PYTHONNOUSERSITE=1 PIP_RESUME_RETRIES=5             # the latter: newer pips go on with a broken download
  local stamp gpu=(--gpu)
  detect_gpu
  choose
  field GPU "$GPU" && field attention "$BACKEND ($WHY)" && field torch "$TORCH ($CUDA)" && field venv "$VENV"
  stamp=$(cat requirements/{train,report,test}.txt "$STACK" - <<<"$BACKEND $TORCH $CUDA" | sha256sum)
  if ((!PLAN)) && [[ $(cat "$VENV/installed" 2>/dev/null) == "$stamp" ]] && usable_venv; then
    stage_model
    say "complete already: nothing to do"
    return
  fi
  find_python
  field python "$PYTHON ($("$PYTHON" -c 'import platform; print(platform.python_version())'))"
  preflight
  ((!PLAN)) || return 0
  step 1 "virtual environment" && make_venv
  step 2 "packages, $([[ $CUDA == cpu ]] && echo "under 1 GB" || echo "about 4 GB") to download" && install_packages
  step 3 "DeepSpeed's compiled ops, a minute or two"
  "$VENV/bin/python" -m harness.measure.verify --build-ops || fail "DeepSpeed's ops could not be built, see above"
  step 4 "model" && stage_model
  step 5 "verifying" && { [[ $CUDA != cpu ]] || gpu=(); }
  "$VENV/bin/python" -m harness.measure.verify --attn "$BACKEND" "${gpu[@]}" || fail "this stack cannot train here, see above"
  printf '%s' "$stamp" >"$VENV/installed"
  say "" && say "ready: VENV=$VENV ./run_sweep.sh"
}

{ main; exit; } # read as a whole: the file may change while it runs
