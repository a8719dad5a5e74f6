#!/bin/bash
#SBATCH --job-name=inpaint-webhook-s1-site
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --mem=2G
#SBATCH --time=10
#SBATCH --dependency=afterany:11:12
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/sweep/notify/site-1.log
#SBATCH --error=/sweep/notify/site-1.log
#SBATCH --export=NONE
#SBATCH --get-user-env=L

set -eo pipefail

# --- environment: nothing is relied on that is not written here
module purge
module load WebProxy
export PYTHONPATH=/sweep/code/0123456789ab
export PYTHONSAFEPATH=1
export PYTHONUNBUFFERED=1
export SUBMITIT_EXECUTOR=slurm
export no_proxy=localhost,127.0.0.1

# --- the job, which is to know when its time is up
export INPAINT_BENCH_END_UNIX=$(($(date +%s) + 600))
python -m launchers.submit.webhook /sweep site 1 /home/me/webhook
