#!/bin/bash
#SBATCH --job-name=inpaint-s1-00
#SBATCH --partition=gpu
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=16
#SBATCH --mem=234G
#SBATCH --gres=gpu:a100:2
#SBATCH --time=60
#SBATCH --array=0-1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/sweep/jobs/00/%A_%a_0_log.out
#SBATCH --error=/sweep/jobs/00/%A_%a_0_log.err
#SBATCH --export=NONE
#SBATCH --get-user-env=L

# --- the end by the time limit; setup and modules count too
export INPAINT_BENCH_END_UNIX=$(($(date +%s) + 3600))
set -eo pipefail

# --- environment: nothing is relied on that is not written here
module purge
module load WebProxy
export PYTHONPATH=/sweep/code/0123456789ab
export PYTHONSAFEPATH=1
export PYTHONUNBUFFERED=1
export no_proxy=localhost,127.0.0.1

# --- the job
srun --unbuffered --cpus-per-task=32 --export=ALL --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpu-bind=none python -u -m launchers.entry /sweep/points 0.yaml 1.yaml
