"""A linear layer, split by columns or rows, in FP8 inside `autocast`."""

import math

import torch
import torch.distributed as dist

from .fp8 import FP8GlobalStateManager, rounded

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Linear(torch.nn.Module):
    """y = x Wᵀ + b."""

    def __init__(
        self,
        in_features,
        out_features,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        rng_tracker_name=None,
        init_method=None,
        bias=True,
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        parameters_split=None,
        device="cuda",
        ub_overlap_ag=False,
        ub_overlap_rs=False,
        ub_overlap_rs_dgrad=False,
        ub_bulk_dgrad=False,
        ub_bulk_wgrad=False,
        ub_name=None,
        delay_wgrad_compute=False,
        symmetric_ar_type=None,
        save_original_input=False,
        name=None,
    ):
        assert not any((fuse_wgrad_accumulation, parameters_split, delay_wgrad_compute))
        super().__init__()
        self.tp_group = tp_group
        self.tp_size = tp_size if tp_group is None else dist.get_world_size(tp_group)
        self.parallel_mode = parallel_mode
        self.in_features, self.out_features = in_features, out_features
        if parallel_mode == "column":
            self.out_features //= self.tp_size
        if parallel_mode == "row":
            self.in_features //= self.tp_size
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        self.use_bias, self.return_bias = bias, return_bias
        options = {"device": device, "dtype": params_dtype or torch.get_default_dtype()}
        self.weight = torch.nn.Parameter(
            torch.empty(self.out_features, self.in_features, **options)
        )
        init_method(self.weight)
        _mark(self.weight, 1 if parallel_mode == "row" else 0)
        # Without a bias the attribute is an empty tensor, not None.
        self.bias = torch.empty(0, **options)
        if bias:
            self.__dict__.pop("bias")
            self.bias = torch.nn.Parameter(torch.zeros(self.out_features, **options))
            if parallel_mode == "column":
                _mark(self.bias, 0)
            else:
                self.bias.sequence_parallel = self.sequence_parallel
        self.cached = None

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        pass

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        for parameter in self.parameters():
            if inp.dtype != parameter.dtype:
                raise TypeError(f"Found input dtype: {inp.dtype} and {parameter.dtype}")
        weight = self.weight
        recipe = FP8GlobalStateManager.recipe
        if recipe is not None:
            for tensor in (inp, weight):
                if math.prod(tensor.shape[:-1]) % 8 or tensor.shape[-1] % 16:
                    raise ValueError(f"FP8 execution requires other dims than {tensor.shape}")
            weight = self._rounded_weight(is_first_microbatch)
        bias = self.bias if self.use_bias else None
        added = None if self.return_bias or self.parallel_mode == "row" else bias
        out = _Product.apply(inp, self.weight, weight.detach(), added, self, recipe is not None)
        if self.return_bias:
            return out, bias
        return out if added is not None or bias is None else out + bias

    def _rounded_weight(self, is_first_microbatch):
        """Return the weight in FP8; with `is_first_microbatch` False, of an earlier call."""
        if is_first_microbatch is None:
            return rounded(self.weight, E4M3)
        if is_first_microbatch:
            self.cached = rounded(self.weight, E4M3).detach()
        return self.cached


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inp, weight, used, bias, layer, fp8):
        gathers = layer.parallel_mode == "column" and layer.sequence_parallel
        x = _gathered(inp, layer.tp_group) if gathers else inp
        x = rounded(x, E4M3) if fp8 else x
        ctx.layer, ctx.fp8, ctx.dtype, ctx.has_bias = layer, fp8, inp.dtype, bias is not None
        ctx.save_for_backward(x, used)
        out = (x.float() @ used.float().T).to(inp.dtype)
        out = out if bias is None else out + bias
        if layer.parallel_mode == "row" and layer.tp_size > 1:
            out = _scattered(out, layer.tp_group) if layer.sequence_parallel else _sum(out, layer)
        return out

    @staticmethod
    def backward(ctx, gradient):
        x, used = ctx.saved_tensors
        layer = ctx.layer
        if layer.parallel_mode == "row" and layer.sequence_parallel:
            gradient = _gathered(gradient, layer.tp_group)
        of_bias = gradient.float().sum((0, 1)).to(ctx.dtype) if ctx.has_bias else None
        g = rounded(gradient, E5M2) if ctx.fp8 else gradient.float()
        of_x = (g @ used.float()).to(ctx.dtype)
        of_weight = (g.flatten(0, 1).T @ x.float().flatten(0, 1)).to(ctx.dtype)
        if layer.parallel_mode == "column" and layer.tp_size > 1:
            of_x = (
                _scattered(of_x, layer.tp_group) if layer.sequence_parallel else _sum(of_x, layer)
            )
        return of_x, of_weight, None, of_bias, None, None


def _mark(parameter, dimension):
    parameter.tensor_model_parallel = True
    parameter.partition_dim, parameter.partition_stride = dimension, 1


def _gathered(own, group):
    whole = own.new_empty(dist.get_world_size(group) * own.shape[0], *own.shape[1:])
    dist.all_gather_into_tensor(whole, own.contiguous(), group=group)
    return whole


def _sum(part, layer):
    total = part.clone()
    dist.all_reduce(total, group=layer.tp_group)
    return total


def _scattered(part, group):
    total = part.clone()
    dist.all_reduce(total, group=group)
    return total.tensor_split(dist.get_world_size(group))[dist.get_rank(group)].contiguous()
