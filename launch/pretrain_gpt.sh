#!/usr/bin/env bash
# Train a GPT. Every form does its own set-up; --dry-run as the last word shows what would be started.
#
#   bash launch/pretrain_gpt.sh                                    # real text, configs/gpt_tiny.yaml, 8 ranks
#   bash launch/pretrain_gpt.sh configs/gpt_tiny.yaml train.steps=20 optimizer.lr=1e-3
#   TP=4 PP=1 VPP=1 DP=2 bash launch/pretrain_gpt.sh configs/gpt_tiny.yaml
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 MASTER_PORT=29500 NPROC_PER_NODE=8 bash launch/pretrain_gpt.sh my.yaml
#   HOSTFILE=hosts bash launch/pretrain_gpt.sh my.yaml             # `host slots=8` per line: started there over ssh
#   sbatch launch/slurm/pretrain_gpt.sbatch my.yaml                # one task per GPU, requeued until it is finished
#
# YAML < environment (TP PP VPP DP MICRO_BATCH_SIZE GLOBAL_BATCH_SIZE RUN_NAME) < dotted overrides.
# runs/ and relative paths belong to the folder that it is started from.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh"

python=$(triaxis_python)
export PYTHONPATH="$triaxis_root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m launch.cli train "$@"
