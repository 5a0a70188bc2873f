#!/usr/bin/env bash
# One run on Slurm: `sbatch jobs/slurm.sh run method=fedprox out=/shared/runs/first`. Edit sizes and partition.
#
# Every node starts Ray, the first one runs the command, and all of them stop Ray when it ends. The words after the
# script's name are those of the command without `raysim`; it joins that Ray (runtime=cluster) unless they name a runtime, and
# out= is on a file system that the nodes share. A job that Slurm ends goes on with the same line and resume=latest; with
# `run --auto-resume` and `sbatch --requeue` it does so by itself.
#SBATCH --job-name=raysim
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-task=1
#SBATCH --mem=64G
#SBATCH --time=04:00:00
#SBATCH --exclusive
# --exclusive because the end of a job stops every Ray of yours on its nodes, also that of another job.
set -euo pipefail

if [ $# -eq 0 ]; then
    echo "slurm.sh: name a command: sbatch jobs/slurm.sh run method=fedprox out=/shared/runs/first" >&2
    exit 2
fi

joins=runtime=cluster
for word in "$@"; do
    if [[ $word == runtime=* ]]; then joins=""; fi
done

# The environment that has raysim: .venv of the folder where the job was submitted, unless RAYSIM_HOME names another.
source "${RAYSIM_HOME:-$SLURM_SUBMIT_DIR}/.venv/bin/activate"

# A token for this job's cluster alone, in a file that only you can read and that all nodes see; what a killed job leaves
# opens nothing.
token="$(mktemp "$SLURM_SUBMIT_DIR/.ray-token-XXXXXX")"
trap 'rm -f "$token"' EXIT
python -c "import secrets; print(secrets.token_hex(32))" > "$token"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$token" RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300

# `ray symmetric-run` starts Ray on each node, waits for all of them, and runs on the first what stands behind `--`.
first="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)"
srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" \
    ray symmetric-run --address "$first:6379" --min-nodes "$SLURM_NNODES" \
    --num-cpus "$SLURM_CPUS_PER_TASK" --disable-usage-stats \
    -- raysim "$@" ${joins:+"$joins"}
