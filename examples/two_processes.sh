#!/usr/bin/env bash
# Data-parallel fine-tuning in two processes of this machine. Each takes its own rows; the gradients are summed, so both apply
# the same update, and the first one writes the run. More machines: mlx.launch --hostfile, see its help.
#   examples/two_processes.sh [more arguments for segtrain sft]
set -euo pipefail
cd "$(dirname "$0")/.."
exec mlx.launch -n 2 segtrain sft configs/demo.yaml --set output.dir=runs/two-processes "$@"
