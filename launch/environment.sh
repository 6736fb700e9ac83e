# shellcheck shell=bash
# Environment variables of all launch scripts, which source this file; set variables are kept.
# For variables of networks see docs/scaling.md, "Networks".

# torchrun would set it to 1 with a warning. One thread per process leaves cores to the data threads.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# Inductor starts up to 32 compiling processes for each of a node's processes.
export TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-4}
# NCCL's flight recorder: each process keeps its last collectives. When the job hangs, the watchdog
# writes them to RUN/stacks/collectives_rank_N; should a collective time out before, torch writes them
# to TORCH_FR_DUMP_TEMP_FILE followed by the rank. `torchfrtrace` finds the missing ranks.
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000}
export TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}
export TORCH_FR_DUMP_TEMP_FILE=${TORCH_FR_DUMP_TEMP_FILE:-/tmp/megavis_collectives_${SLURM_JOB_ID:-$$}_rank_}
# Expandable segments reduce the fragmentation of GPU memory.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
