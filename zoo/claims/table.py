"""All claims, and the choice of some."""

from __future__ import annotations

from collections.abc import Sequence

from zoo.claims import tier1, tier2, tier3
from zoo.claims.claim import Claim
from zoo.errors import UserError
from zoo.names import near

TIERS = (1, 2, 3)
CLAIMS: tuple[Claim, ...] = (*tier1.CLAIMS, *tier2.CLAIMS, *tier3.CLAIMS)


def select(*, tier: int | None = None, only: Sequence[str] = (), free: bool = False) -> tuple[Claim, ...]:
    """Some claims, in the table's order.

    Args:
        tier: of this tier. None: of tier 1, or of every tier where ``only`` names some.
        only: names of claims or of families.
        free: those alone for which nothing is trained.

    Raises:
        UserError: a tier or a name that is not there, or no claim is left.
    """
    if tier is not None and tier not in TIERS:
        raise UserError(f"--tier {tier}: there are tiers 1 (two CPU cores), 2 (one GPU) and 3 (a cluster)")
    known = list(dict.fromkeys(name for claim in CLAIMS for name in (claim.family, claim.name)))
    for name in only:
        if name not in known:
            raise UserError(f"--only {name}: no claim and no family is called so{near(name, known)}; see --list")
    tiers = (tier,) if tier is not None else TIERS if only else (1,)
    found = [claim for claim in CLAIMS if claim.tier in tiers]
    found = [claim for claim in found if not only or claim.name in only or claim.family in only]
    chosen = tuple(claim for claim in found if claim.free or not free)
    if not chosen:
        asked = " and ".join([f"tier {tier}"] * (tier is not None) + [f"--only {' '.join(only)}"] * bool(only))
        raise UserError(
            f"{asked or 'tier 1'}: no claim of it {'goes without training' if free and found else 'is left'}; "
            "`zoo claims --list` shows all"
        )
    return chosen
