#!/bin/bash
#SBATCH --job-name=jaxpar
#SBATCH --nodes={nodes}
{tasks}#SBATCH --exclusive
{gpus}#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
# Two minutes before the time is over: train saves its state and stops, and the job is requeued.
#SBATCH --signal=TERM@{notice_seconds}

# Submit it in a folder that all nodes share, in an environment that has jaxpar.
{variables}srun --kill-on-bad-exit=1 --cpu-bind=none --label {run}{requeue}
