#!/usr/bin/env bash
# The papers' claims at their own scale, in one line on a machine with a GPU:
#   DATA=~/data bash jobs/papers/gpu.sh --minutes 25                    all studies in their order, for 25 minutes
#   DATA=~/data bash jobs/papers/gpu.sh --minutes 25 fedbr-rotated_mnist
# EXTRA holds further settings of all runs, such as EXTRA="rounds=2 local.steps=2" to try the line on a CPU (--device cpu).
# Run the same line again to continue. The first step prepares the runs (needs raysim's dependencies and the data sets); on
# a machine that has no Hydra it is left out, and the folder OUT must come from another one:
#   PREPARE=only DATA=~/data bash jobs/papers/gpu.sh                    only prepares; then carry this checkout with OUT
# Afterwards: uv run python -m jobs.papers.results $OUT/runs/NAME...    stores finished runs for the papers' pages
set -euo pipefail
# Without DATA, data.root has its default.
: "${DATA:=}" "${OUT:=runs/gpu}" "${PYTHON:=python}" "${PREPARE:=}"
names=()
for word in "$@"; do
    case $word in
    -*) takes=$word ;;
    *) [ "${takes:-}" = --minutes ] || [ "${takes:-}" = --device ] || names+=("$word"); takes= ;;
    esac
done
if "$PYTHON" -c 'import hydra' 2> /dev/null; then
    "$PYTHON" -m jobs.papers.gpu prepare "$OUT" ${DATA:+"data.root=$DATA"} ${EXTRA:-} ${names[@]+"${names[@]}"}
fi
[ "$PREPARE" = only ] || "$PYTHON" -m jobs.papers.gpu run "$OUT" "$@"
