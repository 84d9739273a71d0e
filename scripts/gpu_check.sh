#!/usr/bin/env bash
# Parity and speed on one GPU, within 8 minutes on an H200: golden bundles on CUDA, then the full-size step.
# Usage: scripts/gpu_check.sh [OUT_DIR]   (needs torch with CUDA; no network)
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-gpu_check}
mkdir -p "$out"
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
python=${PYTHON:-python3}
$python -c 'import torch; assert torch.cuda.is_available(), "no CUDA device"; print(torch.__version__, torch.cuda.get_device_name())'
status=0
for layer in forward gradient curve; do
  timeout 120 $python -m piston.cli verify $layer --bundle tests/golden --device cuda --json "$out/verify_$layer.json" \
    | tail -n 3 || status=1
done
for batch in 8 32; do
  timeout 120 $python benchmarks/train_step.py --recipe pi05_libero --batch-size $batch --device cuda --steps 8 \
    --json "$out/step_$batch.json" || status=1
done
exit $status
