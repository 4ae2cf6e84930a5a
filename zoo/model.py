"""HybridLM: an embedding, the blocks that a pattern names, a norm, a decoder if asked for, and a head; one device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from zoo import loss
from zoo.errors import UserError
from zoo.pattern import Layer, Pattern, expand, parse
from zoo_kernels.packing import Packing, as_packing
from zoo_layers import init
from zoo_layers.block import Block
from zoo_layers.mixer import MixerCache
from zoo_layers.mlp import GELU, build_mlp, default_d_ff, linear_flops
from zoo_layers.norm import RMSNorm

# What the backward pass may compute again: nothing, all but the costly outputs of a block, or whole blocks.
RECOMPUTE = ("none", "selective", "full")
# Costly outputs: those of projections, of attention, and of the walk over the memory.
_KEPT = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)
_KEPT_OF_OURS = ("zoo_kernels::delta_", "zoo_kernels::flash_attention")


def _keep_costly(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:  # PyTorch's signature
    kept = op in _KEPT or op.name().startswith(_KEPT_OF_OURS)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class Embedding(nn.Embedding):
    """Token vectors that start from N(0, 2 / (5 * width)), as the head does."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            init.normal(self.weight, init.linear_std(self.embedding_dim))


class Decoder(nn.Module):
    """Restores every position of a row from the vector of its last one.

        y[t] = down(gelu(up(x[T - 1] + p[t])));  p[t, i] = sin(t / 10000^(2i / D)), its second half cos

    Its width follows from the model's alone, so that models of one width, whatever their layers, have the same decoder.

    Args:
        d_model: D, width of the residual stream.

    Source: the compression task of Poli et al. 2024, arXiv:2403.17844.
    """

    def __init__(self, d_model: int):
        super().__init__()
        self.mlp = GELU(d_model, default_d_ff(d_model))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> the same."""
        time = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
        angle = time[:, None] * 10_000 ** -(torch.arange(0, x.shape[2], 2, device=x.device) / x.shape[2])
        places = torch.cat([angle.sin(), angle.cos()], dim=-1)[:, : x.shape[2]]
        return self.mlp(x[:, -1:] + places.to(x.dtype))


@dataclass(frozen=True)
class Counts:
    """Parameters of a model, every trainable number once.

    Attributes:
        total: all of them; a tied head once.
        non_embedding: without the token embedding, the head, tied or not, and the decoder.
        decoder: of the decoder; 0 where there is none.
    """

    total: int
    non_embedding: int
    decoder: int = 0


class HybridLM(nn.Module):
    """A language model whose layers a pattern names.

    Args:
        layers: from :func:`zoo.pattern.expand`.
        d_model: width of the residual stream.
        vocab_size: rows of the embedding and of the head; ids lie in 0..vocab_size-1.
        d_ff: width of the MLPs. None: :func:`zoo_layers.mlp.default_d_ff`.
        tie: use the embedding as the head.
        decoder: restore rows: the head reads, at every position, what a :class:`Decoder` makes of the last one. Such a
            model has seen all of a row when it answers, so it predicts no next token.

    The tensors are not filled; :meth:`reset` or :meth:`from_pattern` does that.

    Raises:
        ValueError: sizes out of range.
        SpecError: a mixer that does not fit the width.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        *,
        d_model: int,
        vocab_size: int,
        d_ff: int | None = None,
        tie: bool = False,
        decoder: bool = False,
    ):
        super().__init__()
        for name, value in (("d_model", d_model), ("vocab_size", vocab_size), ("d_ff", d_ff)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"HybridLM: {name} must be a whole number of at least 1, got {value!r}")
        self.layers, self.d_model, self.vocab_size = tuple(layers), d_model, vocab_size
        self.d_ff = default_d_ff(d_model) if d_ff is None else d_ff
        self.embedding = Embedding(vocab_size, d_model)
        self.blocks = nn.ModuleList(
            Block(layer.resolve(d_model).module(d_model), build_mlp(layer.mlp, d_model, self.d_ff), d_model=d_model)
            for layer in self.layers
        )
        self.norm = RMSNorm(d_model)
        self.decoder = Decoder(d_model) if decoder else None
        self.head = init.Linear(d_model, vocab_size)
        self.recompute = "none"
        self.tie = tie
        if tie:
            self.head.weight = self.embedding.weight

    @classmethod
    def from_pattern(
        cls,
        pattern: str | list[Any] | Pattern,
        *,
        n_layers: int | None = None,
        d_model: int,
        vocab_size: int,
        mlp: str = "swiglu",
        d_ff: int | None = None,
        mixers: Mapping[str, Mapping[str, Any]] | None = None,
        tie: bool = False,
        decoder: bool = False,
        seed: int | None = None,
        device: torch.device | str | None = None,
    ) -> Self:
        """Build a model and fill its tensors.

        Args:
            pattern: a line such as ``"GDN,SWA"``, the list form, or a parsed pattern.
            n_layers: depth. None: once through the pattern.
            d_model, vocab_size, d_ff, tie, decoder: as in the class.
            mlp: the MLP of layers that name none.
            mixers: options by mixer name, for layers that do not give their own.
            seed: of the first values. None: drawn from PyTorch's global generator.
            device: where to build. ``"meta"`` allocates nothing and fills nothing.

        Raises:
            PatternError, SpecError: with the place at fault.
        """
        parsed = pattern if isinstance(pattern, Pattern) else parse(pattern)
        layers = expand(parsed, n_layers, mixers=mixers, mlp=mlp)
        return cls.from_layers(
            layers,
            d_model=d_model,
            vocab_size=vocab_size,
            d_ff=d_ff,
            tie=tie,
            decoder=decoder,
            seed=seed,
            device=device,
        )

    @classmethod
    def from_layers(
        cls,
        layers: Sequence[Layer],
        *,
        d_model: int,
        vocab_size: int,
        d_ff: int | None = None,
        tie: bool = False,
        decoder: bool = False,
        seed: int | None = None,
        device: torch.device | str | None = None,
    ) -> Self:
        """:meth:`from_pattern` for layers that are expanded already."""
        # Always by way of meta: a plain build, and one that is sharded before it is filled, then draw the same numbers.
        with torch.device("meta"):
            model = cls(layers, d_model=d_model, vocab_size=vocab_size, d_ff=d_ff, tie=tie, decoder=decoder)
        if torch.device(device or "cpu").type != "meta":
            model.materialise(device or "cpu")
            model.reset(seed)
        return model

    def materialise(self, device: torch.device | str) -> None:
        """Give a model on meta memory on ``device``, garbage until :meth:`reset`; a tied head stays tied."""
        self.to_empty(device=device)
        if self.tie:
            self.head.weight = self.embedding.weight

    def each_block(self) -> Iterator[Block]:
        """The blocks, first to last."""
        for block in self.blocks:
            yield cast(Block, block)

    def set_recompute(self, recompute: str) -> None:
        """Choose what the backward pass computes again instead of keeping: one of ``RECOMPUTE``.

        Neither losses nor gradients depend on it. ``selective`` keeps the outputs of projections, attention and memory,
        and computes norms, convolutions, gates and activations again; ``full`` keeps what enters a block.

        Raises:
            ValueError: an unknown name.
        """
        if recompute not in RECOMPUTE:
            raise ValueError(f"HybridLM: recompute must be one of {', '.join(RECOMPUTE)}, got {recompute!r}")
        self.recompute = recompute

    def compile_blocks(self) -> None:
        """Compile every block in place; names of parameters stay, so checkpoints fit compiled and plain models."""
        for block in self.each_block():
            block.compile()

    def reset(self, seed: int | None = None) -> None:
        """Fill every tensor; see :func:`zoo_layers.init.reset`. A tied head keeps the embedding's values."""
        if seed is None:
            # Lightning builds under a default device, whose generator would give a GPU other values than a CPU.
            seed = int(torch.randint(2**62, (), device="cpu").item())
        init.reset(self, seed)
        if self.tie:
            init.reset(self.embedding, seed)

    def forward(
        self, input_ids: Tensor, caches: Sequence[MixerCache] | None = None, packing: Packing | None = None
    ) -> Tensor:
        """Logits [B, T, vocab_size] for ids [B, T]; arguments as in :meth:`hidden`."""
        return self.head(self.hidden(input_ids, caches, packing))

    def hidden(
        self, input_ids: Tensor, caches: Sequence[MixerCache] | None = None, packing: Packing | None = None
    ) -> Tensor:
        """What the head reads: [B, T, D].

        Args:
            input_ids: [B, T] int64, T >= 1.
            caches: one per layer, from :meth:`new_caches`; read at entry and rewritten at exit.
            packing: documents laid end to end, or None. With caches, one row per document.

        Raises:
            ValueError: ids of another shape or outside the vocabulary (looked at on the CPU only), a wrong number of
                caches, or caches or packing where a decoder needs whole rows.
        """
        if input_ids.dim() != 2 or input_ids.shape[1] == 0:
            raise ValueError(
                f"HybridLM: input_ids must be [batch, tokens] with at least one token, got {list(input_ids.shape)}"
            )
        if input_ids.device.type == "cpu" and input_ids.numel():
            low, high = int(input_ids.min()), int(input_ids.max())
            if low < 0 or high >= self.vocab_size:
                raise ValueError(
                    f"HybridLM: token id {low if low < 0 else high} is outside 0..{self.vocab_size - 1}; the tokenizer "
                    "and "
                    "vocab_size must agree"
                )
        if caches is not None and len(caches) != len(self.blocks):
            raise ValueError(
                f"HybridLM: {len(caches)} caches for {len(self.blocks)} layers; new_caches() makes one per layer"
            )
        if self.decoder is not None and (caches is not None or packing is not None):
            given = "caches" if caches is not None else "packing"
            raise ValueError(
                f"HybridLM: {given} given to a model with a decoder, which restores whole rows from their last "
                "position; leave it out, one row a document"
            )
        packing = as_packing(packing, batch=input_ids.shape[0], tokens=input_ids.shape[1], op="HybridLM")
        x = self.embedding(input_ids)
        for index, block in enumerate(self.each_block()):
            x = self._through(block, x, None if caches is None else caches[index], packing)
        x = self.norm(x)
        return x if self.decoder is None else self.decoder(x)

    def _through(self, block: Block, x: Tensor, cache: MixerCache | None, packing: Packing | None) -> Tensor:
        if self.recompute == "none" or cache is not None or not torch.is_grad_enabled():
            return block(x, cache, packing)
        if self.recompute == "full":
            return checkpoint(block, x, None, packing, use_reentrant=False)
        kept = partial(create_selective_checkpoint_contexts, _keep_costly)
        return checkpoint(block, x, None, packing, use_reentrant=False, context_fn=kept)

    def nll(
        self, input_ids: Tensor, labels: Tensor, packing: Packing | None = None, at_most: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """The summed negative log likelihood of the labels that count, in nats, and how many they are.

        Args:
            input_ids, labels: [B, T]; a label of -100 does not count.
            packing: as :meth:`hidden`.
            at_most: no more labels count, if that is known: :func:`zoo.loss.token_nll`.
        """
        return loss.token_nll(self.hidden(input_ids, packing=packing), self.head.weight, labels, at_most)

    def answered(
        self, input_ids: Tensor, labels: Tensor, packing: Packing | None = None, at_most: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As :meth:`nll`, and the likeliest id at every position, [B, T]."""
        hidden = self.hidden(input_ids, packing=packing)
        nll, tokens = loss.token_nll(hidden, self.head.weight, labels, at_most)
        return nll, tokens, self.head(hidden).argmax(-1)

    def new_caches(
        self, batch: int, context: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> list[MixerCache]:
        """Empty caches, one per layer: ``batch`` rows with room for ``context`` tokens, on the weights' device.

        Raises:
            UserError: a model with a decoder, which has no next token.
        """
        if self.decoder is not None:
            raise UserError(
                "this model restores rows from their last position (it was trained with a decoder, for a task such as "
                "mad_compress) and predicts no next token, so it cannot continue a text; take a checkpoint of another "
                "task or of text"
            )
        weight = self.embedding.weight
        return [
            block.mixer.new_cache(batch, context, dtype=dtype or weight.dtype, device=device or weight.device)
            for block in self.each_block()
        ]

    # -------------------------------------------------------------------------------------------------- what it costs
    def parameter_counts(self) -> Counts:
        """Count the parameters of this instance."""
        every = {id(p): p.numel() for p in self.parameters() if p.requires_grad}
        decoder = [] if self.decoder is None else list(self.decoder.parameters())
        outside = {id(p) for p in (self.embedding.weight, self.head.weight, *decoder)}
        return Counts(
            total=sum(every.values()),
            non_embedding=sum(count for key, count in every.items() if key not in outside),
            decoder=sum(p.numel() for p in decoder if p.requires_grad),
        )

    def flops_per_token(self, context: int) -> float:
        """Model FLOPs of the forward, per token, mean over a document of ``context`` tokens; training: three times."""
        blocks = sum(block.flops_per_token(context) for block in self.each_block())
        return blocks + self.decoder_flops_per_token() + 2 * self.d_model * self.vocab_size

    def decoder_flops_per_token(self) -> int:
        """The part of :meth:`flops_per_token` that is the decoder's; 0 where there is none."""
        return 0 if self.decoder is None else linear_flops(self.decoder)

    def state_bytes(self, context: int) -> int:
        """What decoding keeps per sequence after ``context`` tokens: bf16 keys, values and tails, fp32 states."""
        return sum(block.mixer.state_bytes(context) for block in self.each_block())
