# Variables of every launch script, sourced by them; one that is set already stays as it is.
# What a network may need besides: docs/scaling.md, "Networks".

# torchrun sets it to 1 with a warning where it is absent; one thread a process leaves the data
# threads their cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# NCCL's flight recorder: each process keeps its last collectives and, when one times out, writes
# them to TORCH_FR_DUMP_TEMP_FILE followed by its rank. `torchfrtrace` finds who did not take part.
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000}
export TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}
export TORCH_FR_DUMP_TEMP_FILE=${TORCH_FR_DUMP_TEMP_FILE:-/tmp/megavis_collectives_rank_}
# Segments of the GPU's memory that grow, so that less is lost between tensors of many sizes.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
