"""What a claim is, and what an experiment is that several claims may look at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from zoo.claims.judge import Finding, Rule
from zoo.comparison.plan import Entry, Reading
from zoo.errors import UserError

RECIPES = Path(__file__).parents[2] / "recipes"
# D1, D2, D3: the three documents that the project began with.
SOURCES = {
    "D1": "founding document 1, on DeltaNet (Yang et al. 2024, arXiv:2406.06484)",
    "D2": "founding document 2, a derivation of Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464)",
    "D3": "founding document 3, on Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464)",
}


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Arms trained side by side under one recipe, and what they are measured on.

    Attributes:
        name: of its folder.
        recipe: file name in ``recipes/``, without its ending.
        arms: their titles are what rules call them.
        settings: for all arms, as they would follow ``zoo fit``.
        seeds: of the first weights.
        rates: factors on the recipe's learning rate; each is trained whole, and an arm counts with the one that has the
            lowest mean validation loss.
        matched: arms are brought to one number of parameters by the width of their MLPs.
        readings: what trained models are measured on; the figures are called ``READING/METRIC``.
        lengths: tokens of a row by reading; the decode state is counted at the first.
        score: the figure that pictures show.
        seconds: of one run, with its readings, that has its device for itself.
        gpu: it needs one.
    """

    name: str
    recipe: str
    arms: tuple[Entry, ...]
    settings: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    rates: tuple[float, ...] = (1.0,)
    matched: bool = False
    readings: tuple[Reading, ...] = ()
    lengths: Mapping[str, int] = field(default_factory=dict)
    score: str = "test/accuracy"
    seconds: float
    gpu: bool = True

    @property
    def file(self) -> Path:
        """The recipe; below the working directory as seen from there, so that a run's command serves in any clone.

        Raises:
            UserError: it is not there.
        """
        path = RECIPES / f"{self.recipe}.yaml"
        if not path.is_file():
            raise UserError(f"no recipe at {path}: claims are tried with the recipes of a clone; work in one")
        return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path

    @property
    def context(self) -> int:
        """Tokens at which the decode state is counted."""
        return next(iter(self.lengths.values()), 4096)

    @property
    def stated(self) -> float:
        """Seconds of all runs, one after another."""
        return self.runs * self.seconds

    @property
    def runs(self) -> int:
        """How many there are."""
        return len(self.arms) * len(self.seeds) * len(self.rates)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One sentence that can be tried.

    Attributes:
        name: a word for the command line.
        tier: 1: two CPU cores, minutes; 2: one GPU; 3: a cluster, and data that the user brings.
        family: claims of one family share pictures and may be named together.
        sentence: what is claimed.
        source: who says so.
        expected: what was expected, with figures where the source has them.
        gate: it must hold; False: the verdict is reported and decides nothing.
        experiment, rules: what is trained for it, and what must be true of the scores.
        check, seconds: or what is computed without training, and about how long that takes.
        needs: or what it would take to try it, where that is out of reach here.
    """

    name: str
    tier: int
    family: str
    sentence: str
    source: str
    expected: str
    gate: bool = True
    experiment: Experiment | None = None
    rules: tuple[Rule, ...] = ()
    check: Callable[[], list[Finding]] | None = None
    seconds: float = 0.0
    needs: str = ""

    def __post_init__(self) -> None:
        ways = [self.experiment is not None, self.check is not None, bool(self.needs)]
        if sum(ways) != 1 or bool(self.rules) != ways[0]:
            raise ValueError(
                f"claim {self.name}: give an experiment with rules, or a check, or what it needs; exactly one"
            )
        if self.experiment is not None:
            titles = {entry.title for entry in self.experiment.arms}
            unknown = sorted({arm for rule in self.rules for arm in rule.arms} - titles)
            if unknown:
                raise ValueError(f"claim {self.name}: no arm of {self.experiment.name} is called {unknown[0]!r}")

    @property
    def free(self) -> bool:
        """Whether nothing is trained for it."""
        return self.check is not None

    @property
    def cost(self) -> str:
        """What trying it takes, in words."""
        if self.needs:
            return self.needs
        if self.experiment is None:
            return f"{self.seconds:.0f} s, no training"
        runs = f"{self.experiment.runs} runs of about {self.experiment.seconds:.0f} s"
        return f"{runs} on a GPU" if self.experiment.gpu else runs
