"""Norms, computed in float32."""

import torch


class _Norm(torch.nn.Module):
    has_bias: bool

    def __init__(
        self,
        normalized_shape=None,
        eps=1e-5,
        sequence_parallel=None,
        params_dtype=None,
        zero_centered_gamma=False,
        hidden_size=None,
        **kwargs,
    ):
        assert not zero_centered_gamma
        size = hidden_size if normalized_shape is None else normalized_shape
        super().__init__()
        self.eps = eps
        options = {"device": kwargs.get("device"), "dtype": params_dtype or kwargs.get("dtype")}
        self.weight = torch.nn.Parameter(torch.ones(size, **options))
        if self.has_bias:
            self.bias = torch.nn.Parameter(torch.zeros(size, **options))
        if sequence_parallel is not None:
            for parameter in self.parameters():
                parameter.sequence_parallel = sequence_parallel


class LayerNorm(_Norm):
    """Layer norm; always has a bias."""

    has_bias = True

    def forward(self, x):
        shape, weight, bias = self.weight.shape, self.weight.float(), self.bias.float()
        normed = torch.nn.functional.layer_norm(x.float(), shape, weight, bias, self.eps)
        return normed.to(self.weight.dtype)


class RMSNorm(_Norm):
    """RMS norm."""

    has_bias = False

    def forward(self, x):
        normed = torch.nn.functional.rms_norm(
            x.float(), self.weight.shape, self.weight.float(), self.eps
        )
        return normed.to(self.weight.dtype)
