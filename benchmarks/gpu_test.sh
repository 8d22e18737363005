#!/usr/bin/env bash
# Everything that needs a GPU, in one call: build against the torch that is installed, test, look for races and bad
# accesses, measure. Results of the benchmark go to benchmarks/results/<gpu>. `gpu_test.sh tests` leaves measuring out.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-build/gpu-test}
mkdir -p "$OUT"

step() { printf '\n== %s (%d s)\n' "$1" "$SECONDS"; }

step "build"
NVCC_APPEND_FLAGS="-split-compile=0" "$PYTHON" -m pip install --no-build-isolation --no-deps . >"$OUT/build.log" 2>&1 ||
  { tail -40 "$OUT/build.log"; exit 1; }
"$PYTHON" -c "import ndsoftmax; print(ndsoftmax.build_info())"

step "demo"
"$PYTHON" -m ndsoftmax

step "tests"
"$PYTHON" -m pytest -q -p no:cacheprovider

PARTS=${PARTS:-8}  # processes that share the work of a sanitizer
for tool in memcheck racecheck initcheck synccheck; do
  step "compute-sanitizer $tool"
  parts=()
  for part in $(seq "$PARTS"); do
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $tool --error-exitcode 1 \
      "$PYTHON" benchmarks/sanitize.py "$part/$PARTS" >"$OUT/$tool-$part.log" 2>&1 &
    parts+=($!)
  done
  failed=0
  for pid in "${parts[@]}"; do wait "$pid" || failed=1; done
  tail -qn 1 "$OUT/$tool"-*.log | sort | uniq -c
  if [ $failed = 1 ]; then exit 1; fi
done

if [ "${1:-}" != tests ]; then
  gpu=$("$PYTHON" -c "import torch; print(torch.cuda.get_device_name().replace(' ', '-').lower())")
  results="benchmarks/results/$gpu"
  mkdir -p "$results" "$OUT/results"
  trap 'cp "$results"/* "$OUT/results/"' EXIT
  bench="$PYTHON -m ndsoftmax bench --dtype float32,bfloat16,float16"
  for suite in rows few strided small masked; do
    step "benchmark $suite"
    $bench --suite $suite --csv "$results/$suite.csv" | tee "$results/$suite.txt"
    $bench --suite $suite --backward --csv "$results/$suite-backward.csv" | tee "$results/$suite-backward.txt"
  done
  step "ladder"
  $bench --suite ladder --json "$results/ladder.json" | tee "$results/ladder.txt"
  step "models"
  plot=()
  if "$PYTHON" -c "import matplotlib"; then plot=(--plot "$results/roofline.png" --roofline); fi
  $bench --suite attention,vocab,vision --csv "$results/models.csv" "${plot[@]}" | tee "$results/models.txt"
fi
step "done"
