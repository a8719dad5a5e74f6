#!/bin/bash
#SBATCH --job-name=inpaint-s1-00
#SBATCH --account=bbxx-delta-gpu
#SBATCH --partition=gpuA100x4
#SBATCH --constraint=work
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --mem=224G
#SBATCH --gpus-per-node=4
#SBATCH --time=60
#SBATCH --array=0-1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/sweep/jobs/00/%A_%a_0_log.out
#SBATCH --error=/sweep/jobs/00/%A_%a_0_log.err
#SBATCH --export=ALL
#SBATCH --gpu-bind=none

# --- the end by the time limit; setup and modules count too
export INPAINT_BENCH_END_UNIX=$(($(date +%s) + 3600))
set -eo pipefail

# --- environment: nothing is relied on that is not written here
module reset
export PYTHONPATH=/sweep/code/0123456789ab
export PYTHONSAFEPATH=1
export PYTHONUNBUFFERED=1

# --- the job
srun --unbuffered --cpus-per-task=64 --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 --wait=120 python -u -m launchers.entry /sweep/points 0.yaml 1.yaml
