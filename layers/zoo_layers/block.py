"""One layer of a model: norm, mixer, norm, MLP, with a residual stream that both add to."""

from __future__ import annotations

from torch import Tensor, nn

from zoo_kernels.packing import Packing
from zoo_layers.mixer import MixerCache, TokenMixer
from zoo_layers.mlp import mlp_flops_per_token
from zoo_layers.norm import RMSNorm


class Block(nn.Module):
    """``x + mixer(norm(x))``, then ``x + mlp(norm(x))``.

    Args:
        mixer: lets tokens see earlier tokens.
        mlp: works on each token alone. None: the layer is the mixer alone, with one norm.
        d_model: the width of the residual stream.
    """

    def __init__(self, mixer: TokenMixer, mlp: nn.Module | None, *, d_model: int):
        super().__init__()
        self.mixer_norm = RMSNorm(d_model)
        self.mixer = mixer
        self.mlp_norm = RMSNorm(d_model) if mlp is not None else None
        self.mlp = mlp

    def forward(self, x: Tensor, cache: MixerCache | None = None, packing: Packing | None = None) -> Tensor:
        """x [B, T, D] -> the same; the residual stream keeps x's dtype, under autocast too."""
        x = x + self.mixer(self.mixer_norm(x), cache, packing).to(x.dtype)
        if self.mlp is not None and self.mlp_norm is not None:
            x = x + self.mlp(self.mlp_norm(x)).to(x.dtype)
        return x

    def flops_per_token(self, context: int) -> float:
        """Model FLOPs of this layer's forward, per token, averaged over a document of ``context`` tokens."""
        return self.mixer.flops_per_token(context) + mlp_flops_per_token(self.mlp)
