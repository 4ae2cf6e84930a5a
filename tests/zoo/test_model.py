"""HybridLM: built from a pattern, the same whole, packed, in pieces and from caches."""

import pytest
import torch

from zoo.errors import UserError
from zoo.model import HybridLM
from zoo_kernels.packing import Packing
from zoo_layers.mixer import registered

SETTINGS = {"SWA": {"window": 4, "heads": 2}, "GA": {"heads": 2}, "GDN": {"heads": 1, "head_dim": 8}}
PATTERNS = ["GDN,SWA", "M2,GDN,SWA", "3xGDN,GA", "DN,GA@2,GA@N/2+1", "KDA,GLA,RET,LA/none"]


def model_of(pattern, **settings):
    depth = 12 if "@" in pattern else None
    return HybridLM.from_pattern(
        pattern, n_layers=depth, d_model=32, vocab_size=23, d_ff=16, mixers=SETTINGS, seed=0, **settings
    ).double()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_packed_documents_and_pieces_through_caches_give_what_each_document_gives(pattern):
    model = model_of(pattern).eval()
    torch.manual_seed(1)
    lengths = [7, 1, 0, 12]
    packing = Packing.from_offsets([0, 7, 8, 8, 20])
    ids = torch.randint(0, 23, (1, 20))
    whole = model(ids, packing=packing)[0].split(lengths)
    for document, logits in zip(ids[0].split(lengths), whole):
        if len(document) == 0:
            continue
        alone = model(document[None])[0]
        caches = model.new_caches(1, 20)
        pieces = torch.cat([model(piece[None], caches)[0] for piece in document.split(5)])
        torch.testing.assert_close(logits, alone, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(pieces, alone, rtol=1e-9, atol=1e-10)


def test_the_same_seed_gives_the_same_weights_however_the_model_is_built():
    eager = model_of("M2,GDN,SWA")
    with torch.device("meta"):
        shell = HybridLM(eager.layers, d_model=32, vocab_size=23, d_ff=16)
    shell.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in shell.parameters():
            tensor.fill_(float("nan"))
    shell.reset(0)
    for (name, one), other in zip(eager.named_parameters(), shell.parameters()):
        torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=0, msg=name)
    assert not any(p.isnan().any() for p in eager.parameters())


def test_a_tied_head_is_the_embedding_and_counts_once():
    tied, untied = model_of("LA", tie=True), model_of("LA")
    assert tied.head.weight is tied.embedding.weight
    assert tied.parameter_counts().non_embedding == untied.parameter_counts().non_embedding
    assert untied.parameter_counts().total - tied.parameter_counts().total == 23 * 32


def test_the_loss_is_the_cross_entropy_of_the_logits():
    model = model_of("GDN,SWA")
    ids, labels = torch.randint(0, 23, (2, 9)), torch.randint(0, 23, (2, 9))
    labels[0, :3] = -100
    nll, tokens = model.nll(ids, labels)
    expected = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(nll, expected, rtol=1e-10, atol=0)
    assert int(tokens) == 15


@pytest.mark.parametrize("mixer", registered())
def test_one_line_from_the_readme_builds_every_mixer(mixer):
    model = HybridLM.from_pattern(mixer, n_layers=2, d_model=64, vocab_size=257)
    assert model(torch.zeros(1, 3, dtype=torch.long)).shape == (1, 3, 257)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(3, dtype=torch.long), r"must be \[batch, tokens\]"),
        (torch.zeros(1, 0, dtype=torch.long), "at least one token"),
        (torch.full((1, 2), 23), r"token id 23 is outside 0\.\.22"),
        (torch.full((1, 2), -1), r"token id -1 is outside 0\.\.22"),
    ],
)
def test_ids_that_cannot_be_read_are_named(ids, message):
    with pytest.raises(ValueError, match=message):
        model_of("LA")(ids)


@pytest.mark.parametrize(("name", "value"), [("d_model", 0), ("vocab_size", 2.5), ("d_ff", True)])
def test_sizes_that_are_none_are_named(name, value):
    settings = {"d_model": 32, "vocab_size": 23, name: value}
    with pytest.raises(ValueError, match=f"{name} must be a whole number"):
        HybridLM.from_pattern("LA", **settings)


def test_heads_that_do_not_fit_the_width_are_named_under_the_pattern():
    with pytest.raises(UserError, match="heads") as caught:
        HybridLM.from_pattern("GDN,SWA:heads=5:kv_heads=2", d_model=64, vocab_size=23)
    assert "^" in str(caught.value)


def test_first_values_come_of_the_cpus_random_numbers_whatever_the_default_device():
    """Lightning builds a model under the GPU as default device, whose generator would draw another seed."""
    found = []
    for default in ("cpu", "meta"):
        torch.manual_seed(3)
        with torch.device(default):
            found.append(HybridLM.from_pattern("GDN,GA", d_model=32, vocab_size=11, device="cpu").state_dict())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
