"""Tier 3: what a cluster and text that the user brings would show. Nothing is run and nothing is estimated here."""

from __future__ import annotations

from zoo.claims.claim import SOURCES, Claim


def _claim(name: str, family: str, sentence: str, source: str, expected: str, needs: str) -> Claim:
    return Claim(
        name=name, tier=3, family=family, sentence=sentence, source=source, expected=expected, gate=False, needs=needs
    )


_D1, _D3 = SOURCES["D1"], SOURCES["D3"]
SMALL = "needs 8 GPUs for days, 15B tokens of a SlimPajama subset and its tokenizer (recipes *_340m)"
LARGE = "needs 8 GPUs for weeks, 100B tokens of text and their tokenizer (recipes *_1.3b)"
CLAIMS = (
    _claim(
        "lm_340m",
        "language",
        "DeltaNet with convolution has a lower perplexity than Transformer++ at 340M, and hybrids a lower one still.",
        f"{_D1}, 4.4",
        "Wiki ppl: Transformer++ 28.39, DN 28.24, DN,SWA 27.06, DN with two GA 27.51; within .5, and in this order",
        SMALL,
    ),
    _claim(
        "lm_1.3b",
        "language",
        "At 1.3B both hybrids are ahead of DeltaNet and of Transformer++.",
        f"{_D1}, 4.4",
        "Wiki ppl: Transformer++ 16.85, DN 16.87, DN,SWA 16.56, DN with two GA 16.55; within .5",
        LARGE,
    ),
    _claim(
        "recall_real",
        "language",
        "Two layers of global attention nearly double DeltaNet's recall from documents.",
        f"{_D1}, 4.4",
        "340M, FDA: 12.8 to 23.1; SWDE 26.4 to 42.9",
        f"{SMALL}, and lm-evaluation-harness with SWDE, SQuAD and FDA",
    ),
    _claim(
        "gdn_1.3b",
        "language",
        "Gated DeltaNet is ahead of Mamba-2 and DeltaNet, and the hybrids H1 and H2 of all.",
        _D3,
        "average of 8: GDN 55.32, M2 54.89, Transformer++ 52.25, H1 56.40, H2 56.18",
        f"{LARGE}, and lm-evaluation-harness",
    ),
    _claim(
        "retrieval_1.3b",
        "language",
        "Memories alone retrieve less than attention; with windows they retrieve more.",
        _D3,
        "average of 6: H2 40.1, H1 39.0, Transformer++ 37.0, GDN 30.6, M2 29.8, DN 26.2, in this order",
        f"{LARGE}, and SWDE, SQuAD, FDA, TriviaQA, NQ and DROP cut around the answer",
    ),
    _claim(
        "needle_1.3b",
        "needle",
        "DeltaNet keeps one needle longest; Gated DeltaNet finds it in prose.",
        _D3,
        "S-NIAH-1 at 8K: DN 98.8, GDN 91.8, M2 30.4; S-NIAH-2 at 4K: GDN 92.2, M2 56.2, DN 18.6",
        f"{LARGE}, and RULER's wording and essays",
    ),
    _claim(
        "mad_full",
        "mad",
        "DeltaNet is best of the recurrent in fuzzy recall, worst in memorization, and whole in recall and copying.",
        f"{_D1}, 4.2",
        "35.7 and 52.8; 100 in in-context and noisy recall and selective copying",
        "needs 13 to 26 GPU hours for 396 runs an architecture, and compression, which no task here has",
    ),
    _claim(
        "regbench",
        "regbench",
        "DeltaNet learns languages in context at least as well as Transformer++, GLA and Mamba.",
        f"{_D1}, 4.2",
        "the order, from 1k to 40k examples; a figure without numbers",
        "needs GPU hours for a grid of depths, widths and rates (recipes/regbench.yaml is one point of it)",
    ),
    _claim(
        "throughput_1.3b",
        "speed",
        "DeltaNet trains about as fast as GLA, faster than Mamba, and behind neither length hurts it.",
        f"{_D1}, 4.8; {_D3}",
        "on one H100, 2K x 16: DN 45.9, GDN 46.1, M2 48.1, H1 54.6, Transformer++ 55.0 thousand tokens/s",
        "needs the hardware of the figures: `zoo bench train` measures throughput on yours, and seconds judge nothing",
    ),
    _claim(
        "ratio",
        "hybrids",
        "One attention layer in 4 to 10 suffices.",
        "Dao and Gu 2024, arXiv:2405.21060; Kimi Linear, arXiv:2510.26692",
        "KDA with MLA 0:1, 1:1, 3:1, 7:1, 15:1: 5.77, 5.66, 5.65, 5.70, 5.82",
        "needs GPU days for a sweep of ratios and positions at one size",
    ),
    _claim(
        "s5",
        "tracking",
        "Products of permutations are tracked with several reflections a token.",
        "DeltaProduct, arXiv:2502.10297",
        "accuracy by position at 512, trained at 128",
        "needs a word-problem task and a product of reflections, which the zoo does not have",
    ),
)
