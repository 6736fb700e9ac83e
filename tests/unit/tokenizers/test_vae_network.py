"""VAE network: released activations, parameter counts, and other image sizes."""

import numpy as np
import pytest
import torch
from golden_givt import GOLDEN, golden

from megavis.config.errors import UserError
from megavis.tokenizers.shapes import VAEShape
from megavis.tokenizers.vae import Posterior, VAENetwork
from megavis.weights.released import read_arrays
from megavis.weights.tables import read_table
from megavis.weights.vaes import vae_shape, vae_table

pytestmark = pytest.mark.once


def test_released_weights_reproduce_released_activations():
    arrays = read_arrays(GOLDEN / "vae.npz")
    shape = vae_shape(arrays)
    assert shape == VAEShape(latent_channels=8, filters=32, multipliers=(1, 2, 2))
    network = VAENetwork(shape).requires_grad_(False)
    network.load_state_dict(read_table(vae_table(shape), arrays))
    values = golden("vae")
    pixels, moments, output = (
        torch.tensor(values[name]).permute(0, 3, 1, 2)
        for name in ("image01", "moments", "decoder_output")
    )
    posterior = network.posterior(pixels)
    mean, log_variance = moments.chunk(2, dim=1)
    torch.testing.assert_close(posterior.mean, mean, rtol=0, atol=1e-4)
    torch.testing.assert_close(posterior.log_variance, log_variance, rtol=0, atol=1e-4)
    torch.testing.assert_close(network.decoder(posterior.mean), output, rtol=0, atol=1e-4)


def test_parameter_counts_match_the_paper():
    with torch.device("meta"):
        network = VAENetwork(VAEShape())
    counts = [sum(p.numel() for p in m.parameters()) for m in (network.encoder, network.decoder)]
    assert counts == [23_660_192, 29_372_419]
    assert sum(counts) == 53_032_611


@pytest.mark.parametrize(("side", "latents"), [(256, 16), (512, 32), (250, 16)])
def test_latent_shape_for_any_image_size(side, latents):
    with torch.device("meta"):
        network = VAENetwork(VAEShape())
        posterior = network.posterior(torch.empty(1, 3, side, side))
        assert posterior.mean.shape == (1, 16, latents, latents)
        assert network.decoder(posterior.mean).shape[-1] == 16 * latents


def test_kl_matches_torch_distributions():
    mean, log_variance = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    normals = torch.distributions.Normal(mean, (0.5 * log_variance).exp())
    expected = torch.distributions.kl_divergence(normals, torch.distributions.Normal(0.0, 1.0))
    torch.testing.assert_close(Posterior(mean, log_variance).kl(), expected)


def test_log_variance_is_clipped():
    shape = VAEShape(latent_channels=2, filters=32, multipliers=(1,), blocks_per_level=1)
    network = VAENetwork(shape)
    torch.nn.init.constant_(network.encoder.conv_out.bias, 1e3)
    posterior = network.posterior(torch.rand(1, 3, 4, 4))
    assert posterior.log_variance.max().item() == 20.0


def test_released_weights_need_an_npz_file(tmp_path):
    np.save(tmp_path / "palette.npy", np.zeros(3))
    np.savez(tmp_path / "whole.npz", a=np.zeros(3000))
    (tmp_path / "half.npz").write_bytes((tmp_path / "whole.npz").read_bytes()[:2000])
    for name in ("palette.npy", "half.npz"):
        with pytest.raises(UserError, match=f"{name} is not an .npz file of arrays"):
            read_arrays(tmp_path / name)
