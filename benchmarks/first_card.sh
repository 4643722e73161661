#!/usr/bin/env bash
# What to run first on a machine with a GPU, in pieces of minutes. It ends in one block to paste.
#
#   bash benchmarks/first_card.sh                 # every piece that has no record yet, then the block
#   bash benchmarks/first_card.sh --list          # pieces, their most minutes, what was recorded
#   bash benchmarks/first_card.sh --only parity   # one piece, also again
#   bash benchmarks/first_card.sh --block         # the block alone
#   bash benchmarks/first_card.sh --shapes tiny   # speeds of other models: tiny ones show in minutes that everything runs
#   TRIAXIS_DEVICE=cpu bash benchmarks/first_card.sh       # try on a CPU what a CPU can run
#
# Stop it at any moment: the same command goes on with the piece that was cut off.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/bootstrap.sh"

python=$(triaxis_python dev)
cd "$triaxis_root"
export OMP_NUM_THREADS=1
export PYTHONPATH="$triaxis_root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m benchmarks.first_card "$@"
