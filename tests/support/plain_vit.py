"""A Vision Transformer in plain PyTorch, from the tensors that timm saves."""

import torch
import torch.nn.functional as F

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def of(tensors, name):
    return tensors[f"{name}.weight"], tensors[f"{name}.bias"]


def run_block(x, tensors, prefix, *, num_heads, epsilon=1e-6):
    """Run a block with full attention on `[b, s, h]`."""

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], *of(tensors, f"{prefix}{name}"), epsilon)

    def linear(x, name):
        return F.linear(x, *of(tensors, f"{prefix}{name}"))

    joined = linear(norm(x, "norm1"), "attn.qkv").unflatten(-1, (3, num_heads, -1))
    query, key, value = joined.permute(2, 0, 3, 1, 4)
    shares = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1)
    x = x + linear((shares @ value).transpose(1, 2).flatten(2), "attn.proj")
    return x + linear(F.gelu(linear(norm(x, "norm2"), "mlp.fc1")), "mlp.fc2")


def embedded(tensors, images, statistics=IMAGENET):
    """Return the embedding `[b, n, h]` of the patches of images uint8 `[b, H, W, 3]`."""
    mean, deviation = (torch.tensor(numbers) for numbers in statistics)
    pixels = ((images / 255.0 - mean) / deviation).permute(0, 3, 1, 2)
    kernel, bias = of(tensors, "patch_embed.proj")
    return F.conv2d(pixels, kernel, bias, stride=kernel.shape[-1]).flatten(2).mT


def timm_features(tensors, images, *, num_heads, statistics=IMAGENET, epsilon=1e-6):
    """Return the final norm's output `[b, 1 + n, h]`, the class token first."""
    patches = embedded(tensors, images, statistics)
    x = torch.cat([tensors["cls_token"].expand(len(images), -1, -1), patches], 1)
    x = x + tensors["pos_embed"]
    for layer in range(sum(name.endswith("norm1.weight") for name in tensors)):
        x = run_block(x, tensors, f"blocks.{layer}.", num_heads=num_heads, epsilon=epsilon)
    return F.layer_norm(x, x.shape[-1:], *of(tensors, "norm"), epsilon)
