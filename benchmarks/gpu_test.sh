#!/usr/bin/env bash
# Everything that needs a GPU, in one call: build against the torch that is installed, show, test, look for races and bad
# accesses, measure. Results of the benchmark go to benchmarks/results/<gpu>.
#   gpu_test.sh                    all of it
#   gpu_test.sh build tests        these steps alone: build, demo, tests, sanitize, bench
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-build/gpu-test}
PARTS=${PARTS:-12}  # processes that share the tests, or the work of a sanitizer, and one GPU
mkdir -p "$OUT"

title() { printf '\n== %s (%d s)\n' "$1" "$SECONDS"; }
has() { "$PYTHON" -c "import $1" 2>/dev/null; }

build() {
  title "build"
  "$PYTHON" -m pip install --no-build-isolation --no-deps . >"$OUT/build.log" 2>&1 ||
    { tail -40 "$OUT/build.log"; exit 1; }
  "$PYTHON" -c "import ndsoftmax; print(ndsoftmax.build_info())"
}

demo() {
  title "demo"
  "$PYTHON" -m ndsoftmax
}

tests() {
  title "tests"
  local parallel=()
  if has xdist; then
    parallel=(-n "$PARTS" -p no:benchmark)  # that plugin warns of the other, and warnings are errors
    local -x OMP_NUM_THREADS=2              # of each process, which would take all cores
  fi
  "$PYTHON" -m pytest -q -p no:cacheprovider "${parallel[@]}"
}

sanitize() {
  for tool in memcheck racecheck initcheck synccheck; do
    title "compute-sanitizer $tool"
    local parts=() failed=0 problems=()
    if [ $tool = synccheck ]; then problems=(narrow); fi
    if [ $tool = initcheck ]; then problems=(no-bulk); fi
    for part in $(seq "$PARTS"); do
      PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $tool --kernel-name kns=ndsoftmax \
        --error-exitcode 1 "$PYTHON" tests/sanitize.py "$part/$PARTS" "${problems[@]}" >"$OUT/$tool-$part.log" 2>&1 &
      parts+=($!)
    done
    for pid in "${parts[@]}"; do wait "$pid" || failed=1; done
    tail -qn 1 "$OUT/$tool"-*.log | sort | uniq -c
    if [ $failed = 1 ]; then exit 1; fi
  done
}

bench() {
  local gpu results bench plot=()
  gpu=$("$PYTHON" -c "import torch; print(torch.cuda.get_device_name().replace(' ', '-').lower())")
  results="benchmarks/results/$gpu"
  mkdir -p "$results" "$OUT/results"
  trap "cp '$results'/* '$OUT/results/'" EXIT
  bench="$PYTHON -m ndsoftmax bench --dtype float32,bfloat16,float16"
  for suite in rows few strided small masked random; do
    title "benchmark $suite"
    for direction in "" -backward; do
      if has matplotlib; then plot=(--plot "$results/$suite$direction.png"); fi
      $bench --suite $suite ${direction:+--backward} --csv "$results/$suite$direction.csv" "${plot[@]}" |
        tee "$results/$suite$direction.txt"
    done
  done
  for direction in "" -backward; do
    title "benchmark sweep"
    if has matplotlib; then plot=(--plot "$results/sweep$direction.png"); fi
    $bench --suite sweep --peers none ${direction:+--backward} --csv "$results/sweep$direction.csv" "${plot[@]}" |
      tee "$results/sweep$direction.txt"
  done
  title "host"
  "$PYTHON" benchmarks/host.py --csv "$results/host.csv" | tee "$results/host.txt"
  title "ladder"
  $bench --suite ladder --json "$results/ladder.json" | tee "$results/ladder.txt"
  title "models"
  if has matplotlib; then plot=(--plot "$results/roofline.png" --roofline); fi
  $bench --suite attention,vocab,vision --csv "$results/models.csv" "${plot[@]}" | tee "$results/models.txt"
}

if [ $# = 0 ]; then set -- build demo tests sanitize bench; fi
for step in "$@"; do
  case $step in
    build | demo | tests | sanitize | bench) "$step" ;;
    *) echo "gpu_test.sh: $step is none of build, demo, tests, sanitize, bench" >&2; exit 2 ;;
  esac
done
title "done"
