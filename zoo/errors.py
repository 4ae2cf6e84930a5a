"""What a user can get wrong: errors whose message says what came, what was wanted and what to do."""

from __future__ import annotations

from collections.abc import Sequence

# Above this many characters a text is cut around its first caret.
WIDTH = 100


class UserError(ValueError):
    """A mistake of the user's. The command line prints its message alone and exits with 2."""


# What errors for want of memory say: PyTorch's and Triton's of a GPU, cuBLAS's, and the CPU's allocator's.
_NO_MEMORY = ("out of memory", "cublas_status_alloc_failed", "can't allocate memory")


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there was not enough memory, on a GPU or beside it; most have no class."""
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in _NO_MEMORY)


class PatternError(UserError):
    """A pattern that cannot be read, or that does not fit the model.

    Its message is four lines: the problem; the text; carets under the culprit; the cure. Without a text, it is two.

    Attributes:
        text: what was read, as typed; None where the fault lies in no text.
        spans: (start, end) pairs of characters, from 0, end excluded; ``end`` may lie one behind the text, where
            something is missing there.
        problem: one clause, without a full stop.
        cure: what to do, as a sentence.
        item: the item of a list, from 1; None for a line of text.
    """

    def __init__(
        self,
        problem: str,
        cure: str,
        text: str | None = None,
        spans: Sequence[tuple[int, int]] = (),
        item: int | None = None,
    ):
        super().__init__(problem, cure, text, tuple(spans), item)
        self.problem, self.cure, self.text, self.spans, self.item = problem, cure, text, tuple(spans), item

    def __str__(self) -> str:
        place = f"item {self.item}: " if self.item is not None else ""
        lines = [place + self.problem]
        if self.text is not None and self.spans:
            lines += [f"  {line}".rstrip() for line in _marked(self.text, self.spans)]
        return "\n".join([*lines, self.cure])


def _marked(text: str, spans: Sequence[tuple[int, int]]) -> tuple[str, str]:
    """One printable line of the text, and the carets under it."""
    shown = "".join(c if c.isprintable() else "·" for c in text)
    carets = "".join("^" if any(a <= i < b for a, b in spans) else " " for i in range(len(text) + 1))
    if len(shown) <= WIDTH:
        return shown, carets.rstrip()
    room = WIDTH - 6
    first = min(start for start, _ in spans)
    start = max(0, min(first - room // 3, len(shown) - room))
    before, after = "..." if start else "", "..." if start + room < len(shown) else ""
    # A caret one behind the end still needs its column.
    line, marks = shown[start : start + room], carets[start : start + room + (not after)]
    return before + line + after, (" " * len(before) + marks).rstrip()
