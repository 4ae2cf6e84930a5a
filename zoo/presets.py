"""Presets: names for published patterns, and for whole models with their sizes. Every number says where it is from.

A name without a size sets the pattern and its mixers' options; a name with a size sets depth, width and heads too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from zoo.errors import UserError
from zoo.grammar import Pattern
from zoo.names import mixer_names, near
from zoo.pattern import parse

# Marks of the sources: [paper] read in its text, [config] read in the named repository's configuration, [memory]
# recalled from a paper and not read again, [ours] our choice where the sources are silent.
OURS = "[ours]"
FLAME = "[config] fla-org/flame configs/"
NVLABS = "[config] NVlabs/GatedDeltaNet lit_gpt/config.py"
SAMBA = "[config] microsoft/Samba lit_gpt/config.py"
DELTANET = "[paper] DeltaNet, arXiv:2406.06484"
GATED = "[paper] Gated DeltaNet, arXiv:2412.06464"
KIMI = "[paper] Kimi Linear, arXiv:2510.26692"
VOCABULARY = 32_000  # rows of the Mistral and Llama-2 tokenizers, which the papers use


@dataclass(frozen=True)
class Preset:
    """A pattern with a name, and the sizes that go with it.

    Attributes:
        name: what ``--preset`` takes.
        pattern: the line of text.
        depths: which depths the pattern fits, in words.
        note: what it is, in one line.
        source: where its pattern and numbers are from, unless ``sources`` says otherwise.
        sources: by number, ``n_layers`` or ``SWA.heads``, where it differs from ``source``.
        n_layers, d_model, d_ff, tie, vocab_size: sizes; None in a preset without a size.
        mlp: the model's MLP; None for the default.
        mixers: options by mixer.
    """

    name: str
    pattern: str
    depths: str
    note: str
    source: str
    sources: Mapping[str, str] = field(default_factory=dict)
    n_layers: int | None = None
    d_model: int | None = None
    d_ff: int | None = None
    tie: bool | None = None
    vocab_size: int | None = None
    mlp: str | None = None
    mixers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def parsed(self) -> Pattern:
        """The pattern, read."""
        return parse(self.pattern)

    def settings(self) -> Iterator[tuple[str, Any, str]]:
        """Everything that the preset sets, as (name, value, source)."""
        for name in ("pattern", "n_layers", "d_model", "d_ff", "mlp", "tie", "vocab_size"):
            value = getattr(self, name)
            if value is not None:
                yield name, value, self.sources.get(name, self.source)
        for mixer, options in self.mixers.items():
            for option, value in options.items():
                yield f"{mixer}.{option}", value, self.sources.get(f"{mixer}.{option}", self.source)

    def missing(self) -> list[str]:
        """The mixers of the pattern that are not registered; an empty list: it can be built."""
        known = mixer_names()
        return sorted({entry.mixer for entry in self.parsed().every_entry()} - set(known))

    def why_not(self) -> str | None:
        """Why it cannot be built here, or None where it can."""
        missing = self.missing()
        if not missing:
            return None
        verb = "is" if len(missing) == 1 else "are"
        return f"it needs {' and '.join(missing)}, which {verb} not registered"


def presets() -> dict[str, Preset]:
    """All presets by name, those too that cannot be built yet."""
    return dict(_PRESETS)


def preset(name: str) -> Preset:
    """The preset called ``name``.

    Raises:
        UserError: an unknown name, with the nearest one; a preset whose mixers are not all registered.
    """
    if name not in _PRESETS:
        raise UserError(f"unknown preset '{name}'{near(name, _PRESETS)}\n`zoo presets` lists them all.")
    found = _PRESETS[name]
    reason = found.why_not()
    if reason:
        raise UserError(f"preset {name} cannot be built: {reason}.\n`zoo mixers` lists the mixers that are.")
    return found


# ------------------------------------------------------------------------------------------- patterns without a size
_PATTERNS = (
    Preset("transformer++", "GA", "any", "attention with rotary positions and SwiGLU", FLAME + "transformer_340M.json"),
    Preset("linear", "LA", "any", "linear attention without a feature map", "[paper] arXiv:2006.16236"),
    Preset("retnet", "RET", "any", "a constant decay per head", "[paper] RetNet, arXiv:2307.08621"),
    Preset("gla", "GLA", "any", "a decay per channel that the input sets", "[paper] GLA, arXiv:2312.06635"),
    Preset("mamba", "M1", "any", "Mamba, no MLP", "[paper] Mamba, arXiv:2312.00752", mlp="none"),
    Preset("mamba2", "M2", "any", "Mamba-2, no MLP", "[paper] Mamba-2, arXiv:2405.21060", mlp="none"),
    Preset("hgrn2", "HGRN2", "any", "gates as keys; no lower bounds", "[paper] HGRN2, arXiv:2404.07904"),
    Preset("deltanet", "DN", "any", "the delta rule", DELTANET),
    Preset("gdn", "GDN", "any", "the gated delta rule", GATED),
    Preset(
        "deltanet-swa",
        "DN,SWA",
        "even",
        "every other layer sees a window",
        DELTANET,
        sources={"SWA.window": "[memory] DeltaNet, arXiv:2406.06484", "pattern": DELTANET + "; DN first " + OURS},
        mixers={"SWA": {"window": 2048}},
    ),
    Preset(
        "deltanet-global",
        "DN,GA@2,GA@N/2+1",
        "even, 4 or more",
        "two global layers: the second, and the first of the upper half",
        DELTANET,
    ),
    Preset("gdn-h1", "GDN,SWA", "even", "memory and sight in turn", GATED, mixers={"SWA": {"window": 2048}}),
    Preset(
        "gdn-h2",
        "M2,GDN,SWA",
        "multiple of 3",
        "the best of four orders that the paper tried",
        GATED,
        mixers={"SWA": {"window": 2048}},
    ),
    Preset("samba", "M1,SWA", "even", "an MLP behind each", SAMBA, mixers={"SWA": {"window": 2048}}),
    Preset(
        "qwen3-next",
        "3xGDN,GA:output_gate=true",
        "multiple of 4",
        "published with 48 layers; its experts are not part of the pattern",
        "[config] huggingface/transformers, Qwen3-Next",
        mixers={"GA": {"rope_fraction": 0.25, "qk_norm": True}},
    ),
    Preset(
        "kimi-linear",
        "3xKDA,MLA,MLA@-1",
        "any",
        "published with 27 layers, MLA without rotary; its experts are not part of the pattern",
        KIMI,
    ),
)


# --------------------------------------------------------------------------------------------- whole models, with sizes
def _sized(
    family: str,
    size: str,
    source: str,
    n_layers: int,
    d_model: int,
    d_ff: int | None,
    mixers: Mapping[str, Mapping[str, Any]],
    *,
    tie: bool = False,
    sources: Mapping[str, str] | None = None,
) -> Preset:
    """A family's pattern with sizes: the family's options, and these over them."""
    base = next(p for p in _PATTERNS if p.name == family)
    merged = {name: dict(options) for name, options in base.mixers.items()}
    inherited = {f"{m}.{o}": base.sources.get(f"{m}.{o}", base.source) for m, os in base.mixers.items() for o in os}
    for name, options in mixers.items():
        merged[name] = {**merged.get(name, {}), **options}
    pattern = {"pattern": base.sources.get("pattern", base.source)}
    if base.mlp:
        pattern["mlp"] = base.source
    return Preset(
        f"{family}-{size}",
        base.pattern,
        base.depths,
        base.note,
        source,
        {**pattern, **inherited, **(sources or {})},
        n_layers,
        d_model,
        d_ff,
        tie,
        VOCABULARY,
        base.mlp,
        merged,
    )


_DN_340M, _DN_1B = FLAME + "delta_net_340M.json", FLAME + "delta_net_1B.json"
_NO_SIZES = "[config] a public one of this size; the paper gives no sizes"
_H2_SIZES = ("n_layers", "d_model", "GDN.heads", "GDN.head_dim", "GDN.expand_v", "SWA.heads", "SWA.head_dim", "tie")
_H2_OURS = dict.fromkeys(_H2_SIZES, OURS + " no configuration was released")
_H2_D_FF = OURS + " computed: non-embedding parameters within {} % of {}"
_M2 = {"expand": 2, "head_dim": 64, "state": 128, "groups": 1, "conv": 4}
_GLA = {"heads": 4, "expand_v": 2, "conv": 0, "gate_rank": 16, "gate_normalizer": 16.0}
_UNTIED_SILENT = {"tie": FLAME + "*.json; the paper does not say"}

_SIZED = (
    _sized(
        "transformer++",
        "340m",
        FLAME + "transformer_340M.json",
        24,
        1024,
        2816,
        {"GA": {"heads": 16, "head_dim": 64, "rope_theta": 10000.0}},
    ),
    _sized(
        "transformer++",
        "1.3b",
        FLAME + "transformer_1B.json",
        24,
        2048,
        5632,
        {"GA": {"heads": 32, "head_dim": 64, "rope_theta": 10000.0}},
    ),
    _sized("mamba2", "340m", FLAME + "mamba2_340M.json", 48, 1024, None, {"M2": _M2}),
    _sized("mamba2", "1.3b", FLAME + "mamba2_1B.json", 48, 2048, None, {"M2": _M2}),
    _sized("mamba", "1.3b", FLAME + "mamba_1B.json", 48, 2048, None, {"M1": {"expand": 2, "state": 16, "conv": 4}}),
    _sized("gla", "340m", FLAME + "gla_340M.json", 24, 1024, 2816, {"GLA": {**_GLA, "head_dim": 128}}),
    _sized("gla", "1.3b", FLAME + "gla_1B.json", 24, 2048, 5632, {"GLA": {**_GLA, "head_dim": 256}}),
    # Without the lower bounds of the gates, there one table for all layers; the option `lower_bound` is our form.
    _sized("hgrn2", "340m", FLAME + "hgrn2_340M.json", 24, 1024, 2816, {"HGRN2": {"heads": 8, "head_dim": 128}}),
    _sized("hgrn2", "1.3b", FLAME + "hgrn2_1B.json", 24, 2048, 5632, {"HGRN2": {"heads": 16, "head_dim": 128}}),
    _sized(
        "retnet",
        "1.3b",
        "[config] fla-org/flash-linear-attention, defaults of RetNet",
        24,
        2048,
        2816,
        {"RET": {"heads": 8, "head_dim": 256, "expand_v": 2}},
        sources={"n_layers": _NO_SIZES, "d_model": _NO_SIZES},
    ),
    _sized(
        "deltanet",
        "340m",
        _DN_340M,
        24,
        1024,
        2816,
        {"DN": {"heads": 8, "head_dim": 128, "conv": 4}},
        sources=_UNTIED_SILENT,
    ),
    _sized(
        "deltanet",
        "1.3b",
        _DN_1B,
        24,
        2048,
        5632,
        {"DN": {"heads": 16, "head_dim": 128, "conv": 4}},
        sources=_UNTIED_SILENT,
    ),
    _sized(
        "deltanet-swa",
        "340m",
        _DN_340M,
        24,
        1024,
        2816,
        {"DN": {"heads": 8, "head_dim": 128, "conv": 4}, "SWA": {"heads": 8, "head_dim": 128, "rope_theta": 10000.0}},
        sources={"SWA.heads": OURS, "SWA.head_dim": OURS, "SWA.rope_theta": OURS, **_UNTIED_SILENT},
    ),
    _sized(
        "deltanet-swa",
        "1.3b",
        _DN_1B,
        24,
        2048,
        5632,
        {"DN": {"heads": 16, "head_dim": 128, "conv": 4}, "SWA": {"heads": 16, "head_dim": 128, "rope_theta": 10000.0}},
        sources={"SWA.heads": OURS, "SWA.head_dim": OURS, "SWA.rope_theta": OURS, **_UNTIED_SILENT},
    ),
    _sized(
        "deltanet-global",
        "340m",
        _DN_340M,
        24,
        1024,
        2816,
        {"DN": {"heads": 8, "head_dim": 128, "conv": 4}, "GA": {"heads": 8, "head_dim": 128, "rope_theta": 10000.0}},
        sources={"GA.heads": OURS, "GA.head_dim": OURS, "GA.rope_theta": OURS, **_UNTIED_SILENT},
    ),
    _sized(
        "deltanet-global",
        "1.3b",
        _DN_1B,
        24,
        2048,
        5632,
        {"DN": {"heads": 16, "head_dim": 128, "conv": 4}, "GA": {"heads": 16, "head_dim": 128, "rope_theta": 10000.0}},
        sources={"GA.heads": OURS, "GA.head_dim": OURS, "GA.rope_theta": OURS, **_UNTIED_SILENT},
    ),
    # The head count configured there never reaches its GDN layers; these are the 9 heads that the layers have.
    _sized(
        "gdn",
        "0.4b",
        NVLABS + " GatedDeltaNet_0.4B",
        11,
        1536,
        6144,
        {"GDN": {"heads": 9, "head_dim": 128, "expand_v": 2, "conv": 4}},
        tie=True,
    ),
    _sized(
        "gdn",
        "1.3b",
        NVLABS + " GatedDeltaNet_1.3B",
        16,
        2400,
        5888,
        {"GDN": {"heads": 9, "head_dim": 200, "expand_v": 2, "conv": 4}},
        tie=True,
    ),
    _sized(
        "gdn-h1",
        "0.4b",
        NVLABS + " GatedDeltaNet_H1_0.4B",
        12,
        1536,
        6144,
        {"GDN": {"heads": 9, "head_dim": 128, "expand_v": 2, "conv": 4}, "SWA": {"heads": 12, "head_dim": 128}},
        tie=True,
    ),
    _sized(
        "gdn-h1",
        "1.3b",
        NVLABS + " GatedDeltaNet_H1_1.3B",
        18,
        2304,
        6144,
        {"GDN": {"heads": 9, "head_dim": 192, "expand_v": 2, "conv": 4}, "SWA": {"heads": 18, "head_dim": 128}},
        tie=True,
    ),
    _sized(
        "gdn-h2",
        "0.4b",
        FLAME + "mamba2_340M.json",
        12,
        1536,
        5952,
        {
            "M2": _M2,
            "GDN": {"heads": 9, "head_dim": 128, "expand_v": 2, "conv": 4},
            "SWA": {"heads": 12, "head_dim": 128},
        },
        tie=True,
        sources={**_H2_OURS, "d_ff": _H2_D_FF.format(0.2, "gdn-h1-0.4b"), "GDN.conv": NVLABS},
    ),
    _sized(
        "gdn-h2",
        "1.3b",
        FLAME + "mamba2_1B.json",
        18,
        2304,
        6016,
        {
            "M2": _M2,
            "GDN": {"heads": 6, "head_dim": 256, "expand_v": 2, "conv": 4},
            "SWA": {"heads": 18, "head_dim": 128},
        },
        tie=True,
        sources={**_H2_OURS, "d_ff": _H2_D_FF.format(0.1, "gdn-h1-1.3b"), "GDN.conv": NVLABS},
    ),
    _sized(
        "samba",
        "421m",
        SAMBA + " Samba_421M",
        12,
        1536,
        4096,
        {"M1": {"state": 16}, "SWA": {"heads": 12, "head_dim": 128}},
        tie=True,
    ),
    _sized(
        "samba",
        "1.3b",
        SAMBA + " Samba_1.3B",
        18,
        2304,
        6144,
        {"M1": {"state": 16}, "SWA": {"heads": 18, "head_dim": 128}},
        tie=True,
    ),
    # Dense, where the published ones have experts; d_ff so that it has the size of transformer++-340m.
    _sized(
        "kimi-linear",
        "340m",
        OURS + " dense; the published cycle, head sizes and ranks",
        24,
        1024,
        2688,
        {
            "KDA": {"heads": 8, "head_dim": 128, "conv": 4},
            "MLA": {"heads": 8, "head_dim": 128, "rank": 512, "rope_dim": 64, "value_dim": 128},
        },
    ),
)

_PRESETS = {p.name: p for p in (*_PATTERNS, *_SIZED)}
