"""Only names, in annotations of Megatron-Core."""


class Sequential: ...


class FusibleOperation: ...
