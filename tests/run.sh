#!/usr/bin/env bash
# Run the tests; installs what they need, as launch/pretrain_gpt.sh does.
#
#   bash tests/run.sh                        # the CI tier: all but `slow` and `gpu`, under 11 minutes on 2 cores
#   bash tests/run.sh --all                  # everything; `gpu` tests skip where there is no GPU
#   bash tests/run.sh tests/engine -k lr     # arguments go to pytest
#   bash tests/run.sh -n 0 --pdb             # in one process, as a debugger needs
#   bash tests/run.sh --cuda-stub            # the program for GPUs on a stub of CUDA (tests/cuda_stub); makes .venv-cuda, 2 GB
#   bash tests/run.sh --dry-run              # print the pytest line only
#
# Files of tests run side by side, one per core and at most four: a test of ranks waits more than it computes.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/bootstrap.sh"

tier=(-m "not slow and not gpu")
stub=
dry_run=
arguments=()
for argument in "$@"; do
  case $argument in
    --all) tier=() ;;
    --cuda-stub) stub=yes ;;
    --dry-run) dry_run=yes ;;
    *) arguments+=("$argument") ;;
  esac
done

python=$(triaxis_python dev)
cd "$triaxis_root"
if [ -n "$stub" ]; then
  python=$("$python" tests/cuda_stub/environment.py)
  tier=(--dist worksteal -m "(cuda_stub or gpu) and not card and not slow")
  [[ " ${arguments[*]}" == *" tests/"* ]] || arguments+=(tests/cuda_stub tests/engine tests/launch/footprint tests/launch/rank)
fi
export OMP_NUM_THREADS=1
export PYTHONPATH="$triaxis_root:$triaxis_root/tests/plugins${PYTHONPATH:+:$PYTHONPATH}"
command=("$python" -m pytest -p times -n logical --maxprocesses 4 --dist loadfile "${tier[@]}" "${arguments[@]}")
if [ -n "$dry_run" ]; then
  printf '%q ' "${command[@]}"
  echo
  exit 0
fi
exec "${command[@]}"
