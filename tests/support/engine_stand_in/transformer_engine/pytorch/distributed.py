"""Only a name, of which Megatron-Core derives a class."""


class CudaRNGStatesTracker: ...
