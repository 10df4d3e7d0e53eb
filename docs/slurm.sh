#!/bin/bash
# Trains on four nodes with eight GPUs each under Slurm: one process per node.
#
# Change what is marked CHANGE. Then run `sbatch slurm.sh` in a folder that all nodes share, in an
# environment that has jaxpar. The same script starts a run and continues it.

#SBATCH --job-name=jaxpar
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --exclusive
#SBATCH --requeue
# CHANGE: number of nodes. A run with --elastic may have a range, such as 2-4.
#SBATCH --nodes=4
# CHANGE: GPUs of a node. Without GPUs, remove this line.
#SBATCH --gpus-per-node=8
# CHANGE: time limit. Two minutes before it, train saves its state and stops.
#SBATCH --time=01:00:00
#SBATCH --signal=TERM@120

# CHANGE: numbers of the GPUs of a node. JAX alone would take one GPU per process.
export JAX_LOCAL_DEVICE_IDS=0,1,2,3,4,5,6,7
# Without GPUs, use this line instead:
# export JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8

# CHANGE: the command. An elastic run needs a folder of its own, such as runs/large, and --elastic.
out_dir=runs/slurm-$SLURM_JOB_ID
srun --kill-on-bad-exit=1 --cpu-bind=none --label python -m jaxpar \
  train lm --mesh dp8pp4 --train.out-dir "$out_dir" --resume-or-begin
code=$?

case $code in
  0 | 2 | 3) ;; # Finished, a mistake, or a number that isn't finite: another start would end alike.
  143) scontrol requeue "$SLURM_JOB_ID" ;; # Stopped by SIGTERM, with its state saved.
  # CHANGE: with --elastic, use this line as well. It continues after a lost node or process.
  # *) [ "${SLURM_RESTART_COUNT:-0}" -lt 100 ] && scontrol requeue "$SLURM_JOB_ID" ;;
esac
exit $code
