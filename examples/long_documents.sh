#!/usr/bin/env bash
# Fine-tuning on documents of 12,000 tokens and more: writes the rows, if they aren't there yet, and trains.
#   examples/long_documents.sh [more arguments for segtrain sft]
set -euo pipefail
cd "$(dirname "$0")/.."
[ -f runs/long-documents-data/train.jsonl ] || python examples/long_documents.py
exec segtrain sft examples/long-documents.yaml "$@"
