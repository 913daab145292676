"""Constants of the estimate, fitted to measured peaks. Written by `python benchmarks/fit.py`.

CPU, 159 settings: error of the whole peak 1.6% in the median, 9.8% at worst;
of what is above the model 2.6% and 13.3%.

GPU, 38 settings: error of the whole peak 0.8% in the median, 5.3% at worst;
of what is above the model 2.2% and 25.9%.

Time, 12 plans: error 2.3% in the median, 7.5% at worst.
"""

CPU_RUN_AHEAD = 1.0  # of what the graph says comes and goes in a backward pass
CPU_FUSED = 0.65  # of that, in compiled segments
CPU_UNPACKING = 11.0  # bytes for each packed weight being expanded, beside its dense copy
TILES = 6.4  # tiles of scores at work at a time, in attention by blocks
LOGIT_FLOAT32 = 8.4  # bytes a logit of a chunk of the head
LOGIT_HALF = 13.0  # the same in half precision
CAPPED_FLOAT32 = 13.2  # bytes a logit with a soft-cap
CAPPED_HALF = 15.0  # the same in half precision
FULL_FLOAT32 = 15.8  # bytes a logit in full backward, differentiated through the softmax
FULL_HALF = 16.0  # the same in half precision
CUDA_RUN_AHEAD = 1.4  # of what comes and goes, with MLX's own command buffers
CUDA_WORKSPACE = 256.0  # MiB that matrix products in flight hold for themselves
SMALL_RUN_AHEAD = 0.938  # of what comes and goes, with small command buffers
SMALL_HELD = 6.0  # hidden-sized arrays of a layer that small command buffers hold though done with
KEPT_RUN_AHEAD = 0.893  # of what comes and goes in a segment whose products are kept
TIGHT_WORKSPACE = 0.55  # of the workspace, where the device waits for memory
TIGHT_DENSE = 0.4  # of a layer's dense copies, there
TIGHT_UNCOMPILED = 2.2  # of temporaries there, where the segment isn't compiled
AGAIN = 0.8  # of a layer's products in forward: the time of computing it again
AGAIN_KEPT = 0.128  # the same where its products are kept, for its elementwise operations
