#!/usr/bin/env bash
# Train a GPT. Every form does its own set-up; --dry-run as the last word shows what would be started.
#
#   bash launch/pretrain_gpt.sh                                    # real text; configs/gpt_tiny.yaml, or on GPUs gpt_125m_bytes.yaml
#   bash launch/pretrain_gpt.sh configs/gpt_tiny.yaml train.steps=20 optimizer.lr=1e-3
#   TP=4 PP=1 VPP=1 DP=2 bash launch/pretrain_gpt.sh configs/gpt_tiny.yaml
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 MASTER_PORT=29500 NPROC_PER_NODE=8 bash launch/pretrain_gpt.sh my.yaml
#   HOSTFILE=hosts bash launch/pretrain_gpt.sh my.yaml             # `host slots=8` per line: started there over ssh
#   sbatch launch/slurm/pretrain_gpt.sbatch my.yaml                # one task per GPU, requeued until it is finished
#   sbatch --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 launch/pretrain_gpt.sh my.yaml      # the same
#
# YAML < environment (TP CP PP VPP DP EP ETP MICRO_BATCH_SIZE GLOBAL_BATCH_SIZE RUN_NAME) < dotted overrides.
# runs/ and relative paths belong to the folder that it is started from.
#SBATCH --output=%x-%j.out
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
submitted_from=${TRIAXIS_ROOT:-${SLURM_SUBMIT_DIR:-}}
if [ -n "${SLURM_JOB_ID:-}" ] && [ ! -f "$here/bootstrap.sh" ]; then
  # sbatch runs a copy of this file: it is the batch script.
  if [ ! -f "$submitted_from/launch/slurm/pretrain_gpt.sbatch" ]; then
    echo "triaxis: $submitted_from is not a checkout of Triaxis (no launch/slurm/pretrain_gpt.sbatch): nothing to start." >&2
    echo "triaxis: submit from the root of the checkout, or set TRIAXIS_ROOT to it." >&2
    exit 2
  fi
  # shellcheck source=slurm/pretrain_gpt.sbatch
  source "$submitted_from/launch/slurm/pretrain_gpt.sbatch" "$@"
fi
source "$here/bootstrap.sh"

python=$(triaxis_python)
export PYTHONPATH="$triaxis_root${PYTHONPATH:+:$PYTHONPATH}"
# Do not import a launch.py or torch.py from the current folder (launch/start/import_path.py).
export PYTHONSAFEPATH=1
# The command that an error message suggests begins with this file (launch/start/foreign_options.py).
export TRIAXIS_SCRIPT="$0"
exec "$python" -m triaxis.launch.cli train "$@"
