"""Metrics as sums: the same value whatever the batch size, the order or the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric


class TokenLoss(Metric):
    """Cross-entropy over real tokens, from sums kept in float64.

    Feed it sums, never means. All values are NaN-free: a metric without a token raises instead.
    """

    full_state_update = False
    nll: Tensor
    tokens: Tensor
    bytes: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("nll", "tokens", "bytes"):
            self.add_state(name, default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.set_dtype(torch.float64)

    def update(self, nll: Tensor | float, tokens: Tensor | int, text_bytes: Tensor | int | None = None) -> None:
        """Add one batch.

        Args:
            nll: sum of the negative log-likelihoods of the labels that count, nats.
            tokens: how many labels count; 0 is fine.
            text_bytes: UTF-8 bytes those labels stand for; None where labels are no text.
        """
        self.nll += torch.as_tensor(nll).detach().to(self.nll)
        self.tokens += tokens
        if text_bytes is not None:
            self.bytes += text_bytes

    def compute(self) -> dict[str, Tensor]:
        """``loss``, nats per token; ``ppl``, perplexity per token; ``bpb``, bits per byte, where bytes were counted.

        Raises:
            ValueError: no token was counted.
        """
        if self.tokens == 0:
            raise ValueError(
                "metrics: no token was counted, so there is no loss; give update() a batch with labels first"
            )
        loss = self.nll / self.tokens
        values = {"loss": loss, "ppl": loss.exp()}
        if self.bytes > 0:
            values["bpb"] = self.nll / self.bytes / math.log(2)
        return values


class TaskScore(Metric):
    """Accuracy of answers, over all labels and per slice, from sums kept in float64.

    Args:
        slice_names: names of the masks that every batch brings.
        classes: how many answers are possible, for a score scaled to chance; None: not scaled.
        ids: every label is below it, for the mean over answers; None: not taken.
        legal: batches bring the sets of right answers under the slice name ``legal``.
    """

    full_state_update = False
    # One entry for all labels, then one per slice.
    labels: Tensor
    right: Tensor
    rows: Tensor
    row_means: Tensor
    rows_right: Tensor
    legal_right: Tensor
    outdated: Tensor
    outdated_given: Tensor
    # One entry for each id.
    labels_of: Tensor
    right_of: Tensor

    def __init__(
        self,
        slice_names: Sequence[str] = (),
        *,
        classes: int | None = None,
        ids: int | None = None,
        legal: bool = False,
    ) -> None:
        super().__init__()
        self.slice_names, self.classes, self.ids, self.legal = tuple(slice_names), classes, ids, legal
        sizes: dict[str, tuple[int, ...]] = dict.fromkeys(
            ("labels", "right", "rows", "row_means", "rows_right", "legal_right"), (1 + len(self.slice_names),)
        )
        sizes |= {"outdated": (), "outdated_given": (), "labels_of": (ids or 0,), "right_of": (ids or 0,)}
        for name, size in sizes.items():
            self.add_state(name, default=torch.zeros(size, dtype=torch.float64), dist_reduce_fx="sum")
        self.set_dtype(torch.float64)
        self._shares: list[Tensor] = []

    def update(
        self, answers: Tensor, labels: Tensor, slices: Mapping[str, Tensor] | None = None, stale: Tensor | None = None
    ) -> None:
        """Add one batch.

        Args:
            answers: int64 [B, T], the id given at each position.
            labels: int64 [B, T], -100 is not counted.
            slices: bool [B, T] by slice name; needed if the metric was made with slice names. ``legal``, if it was made
                for that: int64 [B, T], bit ``i`` set where id ``i`` is right.
            stale: int64 [B, T], the outdated answer, -100 where there is none.

        Raises:
            ValueError: shapes that disagree, or a slice that is missing.
        """
        if answers.shape != labels.shape or answers.dim() != 2:
            raise ValueError(
                f"metrics: answers are {list(answers.shape)} and labels {list(labels.shape)}; both must be [B, T]"
            )
        wanted = (*self.slice_names, *(["legal"] if self.legal else []))
        missing = [name for name in wanted if slices is None or name not in slices]
        if missing:
            raise ValueError(
                f"metrics: the batch has no slice {missing[0]!r}; give update() the masks the metric was made for"
            )
        counted = labels != -100
        masks = torch.stack([counted, *(counted & slices[name] for name in self.slice_names)] if slices else [counted])
        right = masks & (answers == labels)
        per_row, right_per_row = masks.sum(-1).double(), right.sum(-1).double()  # [slices, B]
        used = per_row > 0
        self.labels += per_row.sum(-1)
        self.right += right_per_row.sum(-1)
        self.rows += used.sum(-1)
        self.row_means += (right_per_row / per_row.clamp(min=1)).sum(-1)
        self.rows_right += (used & (right_per_row == per_row)).sum(-1)
        self._shares.append(right_per_row[0] / per_row[0])
        if self.ids is not None:
            self.labels_of += torch.bincount(labels[counted], minlength=self.ids)
            self.right_of += torch.bincount(labels[right[0]], minlength=self.ids)
        if self.legal and slices is not None:
            allowed = (slices["legal"] >> answers.clamp(max=63)) & 1 == 1
            self.legal_right += (masks & allowed).sum((-2, -1))
        if stale is not None:
            known = counted & (stale != -100)
            self.outdated += known.sum()
            self.outdated_given += (known & (answers == stale)).sum()

    def row_shares(self) -> Tensor:
        """The share of its labels that each row has right, float64 [rows], in the order read, of this process alone;
        NaN where a row has no label."""
        return torch.cat(self._shares) if self._shares else torch.zeros(0, dtype=torch.float64)

    def reset(self) -> None:
        """Begin anew."""
        super().reset()
        self._shares = []

    def compute(self) -> dict[str, Tensor]:
        """Shares in [0, 1]; the first three also as ``NAME/accuracy`` and so on for every slice with a label.

        Returns:
            ``accuracy``: over labels. ``row_accuracy``: averaged over rows. ``exact``: rows without an error.
            ``legal_accuracy``: labels at which one of the right answers was given, where there are several.
            ``class_accuracy``: the mean over the ids that are labels of the accuracy of each.
            ``scaled_accuracy``: 0 at chance, 1 at best (below 0 if worse than chance), where ``classes`` are given.
            ``stale_rate``: of the labels that have an outdated answer, those at which it was given.

        Raises:
            ValueError: no label was counted.
        """
        if self.labels[0] == 0:
            raise ValueError(
                "metrics: no label was counted, so there is no accuracy; give update() a batch with labels"
            )
        values = {}
        for index, prefix in enumerate(("", *(f"{name}/" for name in self.slice_names))):
            if self.labels[index] > 0:
                values[f"{prefix}accuracy"] = self.right[index] / self.labels[index]
                values[f"{prefix}row_accuracy"] = self.row_means[index] / self.rows[index]
                values[f"{prefix}exact"] = self.rows_right[index] / self.rows[index]
                if self.legal:
                    values[f"{prefix}legal_accuracy"] = self.legal_right[index] / self.labels[index]
        if self.ids is not None:
            asked = self.labels_of > 0
            values["class_accuracy"] = (self.right_of[asked] / self.labels_of[asked]).mean()
        if self.classes is not None:
            values["scaled_accuracy"] = (values["accuracy"] - 1 / self.classes) / (1 - 1 / self.classes)
        if self.outdated > 0:
            values["stale_rate"] = self.outdated_given / self.outdated
        return values


def unigram_entropy(tokens: np.ndarray) -> float:
    """Bits per token of a code that knows how often each id occurs in ``tokens``, and nothing else.

    The plug-in estimate: the entropy of the counted frequencies. It lies below the true entropy by about
    (different ids - 1) / (2 n ln 2) bits.

    Args:
        tokens: [n] ids, n at least 1.

    Raises:
        ValueError: no token.
    """
    tokens = np.asarray(tokens).reshape(-1)
    if not tokens.size:
        raise ValueError("metrics: the entropy of no tokens is asked for; give at least 1")
    counts = np.unique(tokens, return_counts=True)[1]
    return float(-(counts / tokens.size) @ np.log2(counts / tokens.size))


def answer_entropy(labels: np.ndarray) -> float:
    """Nats a label costs where only its frequency is known: the loss of a model that has learned which answers occur,
    and nothing of when.

    The plug-in estimate plus (different ids - 1) / (2 n), which is by how much it lies below the true entropy (Miller
    1955): tasks have hundreds to thousands of answers, and few labels of each.

    Args:
        labels: [n] ids that count, n at least 1.

    Raises:
        ValueError: no label.
    """
    return unigram_entropy(labels) * math.log(2) + (len(np.unique(labels)) - 1) / (2 * np.size(labels))


def bigram_conditional_entropy(tokens: np.ndarray) -> float:
    """Bits per token of a code that knows how often each id follows each other one in ``tokens``.

    The plug-in estimate, taken over the n - 1 neighbouring pairs: H(pairs) - H(first of the pairs). As it is fitted to
    the very tokens it describes, it lies below what a bigram model could reach on new text, so a model that beats it
    has learned more than pairs.

    Args:
        tokens: [n] ids, n at least 2.

    Raises:
        ValueError: fewer than 2 tokens.
    """
    tokens = np.asarray(tokens, dtype=np.int64).reshape(-1)
    if tokens.size < 2:
        raise ValueError(f"metrics: a pair needs 2 tokens, {tokens.size} given")
    pairs = tokens[:-1] * (int(tokens.max()) + 1) + tokens[1:]
    return unigram_entropy(pairs) - unigram_entropy(tokens[:-1])
