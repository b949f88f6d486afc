#!/usr/bin/env bash
# The checks that need a real card: one script, one card, at most eight minutes. Without a card it says so and ends well.
#
#   tests/gpu/run.sh [pytest options]      PY=python   another interpreter (default .venv/bin/python)
set -euo pipefail
cd "$(dirname "$0")/../.."
PY=${PY:-.venv/bin/python}

if ! command -v nvidia-smi >/dev/null; then
  echo "No NVIDIA driver on this machine: nothing to check."
  exit 0
fi
if [[ ! -x $PY ]]; then
  echo "No environment: run \`make setup-dev\` first, or name an interpreter with PY=." >&2
  exit 2
fi
nvidia-smi --query-gpu=index,name,uuid,memory.used,memory.total,driver_version --format=csv
exec timeout --signal=INT 480 "$PY" -m pytest tests/gpu -m gpu -n 0 -ra -s "$@"
