"""Metrics: sums that do not depend on how they were added up."""

import math
import random

import numpy as np
import pytest
import torch
from torchmetrics.text import Perplexity

from zoo.data import TaskData, TokenData
from zoo.data.tasks import make_task
from zoo.metrics import TaskScore, TokenLoss, answer_entropy, bigram_conditional_entropy, unigram_entropy


@pytest.fixture
def dice():
    seed = random.SystemRandom().randrange(2**31)
    print(f"numbers drawn with seed {seed}")
    torch.manual_seed(seed)
    return random.Random(seed)


def nll_of(logits, labels):
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum"
    )


def test_the_loss_is_the_mean_over_all_tokens_not_over_batches(dice):
    logits, labels = torch.randn(9, 12, 7), torch.randint(0, 7, (9, 12))
    labels[torch.rand(9, 12) < 0.4] = -100
    labels[4] = -100  # a batch without a token
    oracle = Perplexity(ignore_index=-100)
    oracle.update(logits, labels)
    for pieces in ([9], [1] * 9, [4, 5]):
        metric = TokenLoss()
        for x, y in zip(logits.split(pieces), labels.split(pieces)):
            metric.update(nll_of(x, y), (y != -100).sum(), int((y > 2).sum()))
        values = metric.compute()
        counted = int((labels != -100).sum())
        expected = nll_of(logits, labels).item() / counted
        assert values["loss"].item() == pytest.approx(expected, rel=1e-5)
        assert values["ppl"].item() == pytest.approx(oracle.compute().item(), rel=1e-4)
        bytes_counted = int((labels > 2).sum())
        assert values["bpb"].item() == pytest.approx(expected * counted / bytes_counted / math.log(2), rel=1e-5)


def test_sums_are_float64_and_survive_many_small_batches():
    metric = TokenLoss()
    for _ in range(1000):
        metric.update(torch.tensor(1e5 + 0.25, dtype=torch.float64), 1)
    metric.half()  # a trainer in half precision casts its modules
    assert metric.nll.dtype == torch.float64
    assert metric.compute()["loss"].item() == 1e5 + 0.25
    assert "bpb" not in metric.compute()


def test_a_uniform_model_costs_eight_bits_and_a_little_a_byte():
    module = TokenData(seq_len=128, batch_tokens=4096)
    metric = TokenLoss()
    for batch in module.val_dataloader():
        logits = torch.zeros(*batch["labels"].shape, module.vocab_size)
        metric.update(nll_of(logits, batch["labels"]), batch["tokens"], batch["bytes"])
    counts = module.manifest()["splits"]["val"]
    values = metric.compute()
    assert values["ppl"].item() == pytest.approx(257, rel=1e-5)
    assert values["bpb"].item() == pytest.approx(math.log2(257) * counts["tokens"] / counts["bytes"], rel=1e-6)


def test_no_token_is_an_error_and_not_a_nan():
    metric = TokenLoss()
    metric.update(torch.tensor(0.0), 0, 0)
    with pytest.raises(ValueError, match="no token was counted"):
        metric.compute()
    score = TaskScore()
    score.update(torch.zeros(1, 2).long(), torch.full((1, 2), -100))
    with pytest.raises(ValueError, match="no label was counted"):
        score.compute()


def test_states_of_two_ranks_add_up(dice):
    whole, parts = TokenLoss(), [TokenLoss(), TokenLoss()]
    for i in range(5):
        nll, tokens = torch.rand(()) * 100, dice.randrange(1, 50)
        whole.update(nll, tokens, tokens + 1)
        parts[i % 2].update(nll, tokens, tokens + 1)
    summed = {
        name: reduce(torch.stack([getattr(part, name) for part in parts])) for name, reduce in whole._reductions.items()
    }
    for name, value in summed.items():
        assert value.sum().item() == pytest.approx(getattr(whole, name).item(), rel=1e-12)


def test_scores_equal_counting_by_hand(dice):
    labels = torch.randint(0, 3, (40, 6))
    labels[torch.rand(40, 6) < 0.5] = -100
    labels[3] = -100
    answers, stale = torch.randint(0, 3, (40, 6)), torch.randint(0, 3, (40, 6))
    stale[torch.rand(40, 6) < 0.5] = -100
    mask = torch.rand(40, 6) < 0.3
    score = TaskScore(["some", "none"], classes=3)
    for start in range(0, 40, 8):
        part = slice(start, start + 8)
        none = torch.zeros(8, 6, dtype=torch.bool)
        score.update(answers[part], labels[part], {"some": mask[part], "none": none}, stale[part])
    values = {name: value.item() for name, value in score.compute().items()}

    expected = {}
    for prefix, chosen in [("", labels != -100), ("some/", mask & (labels != -100))]:
        rows = [(answers[i][chosen[i]] == labels[i][chosen[i]]).double() for i in range(40) if chosen[i].any()]
        expected[f"{prefix}accuracy"] = torch.cat(rows).mean().item()
        expected[f"{prefix}row_accuracy"] = np.mean([row.mean().item() for row in rows])
        expected[f"{prefix}exact"] = np.mean([row.min().item() for row in rows])
    expected["scaled_accuracy"] = (expected["accuracy"] - 1 / 3) / (2 / 3)
    known = (labels != -100) & (stale != -100)
    expected["stale_rate"] = (answers[known] == stale[known]).double().mean().item()
    assert values == pytest.approx(expected, rel=1e-6)


def test_one_of_several_right_answers_and_the_mean_over_ids_are_counted_by_hand(dice):
    labels, answers = torch.randint(0, 5, (40, 6)), torch.randint(0, 6, (40, 6))
    labels[torch.rand(40, 6) < 0.3] = -100
    sets = torch.rand(40, 6, 6) < 0.4
    mask = torch.rand(40, 6) < 0.5
    bits = (sets.long() << torch.arange(6)).sum(-1)
    score = TaskScore(["some"], ids=6, legal=True)
    for start in range(0, 40, 8):
        part = slice(start, start + 8)
        score.update(answers[part], labels[part], {"some": mask[part], "legal": bits[part]})
    values = score.compute()
    counted = labels != -100
    given = torch.gather(sets, 2, answers.unsqueeze(-1)).squeeze(-1)
    assert values["legal_accuracy"].item() == pytest.approx(given[counted].double().mean().item())
    assert values["some/legal_accuracy"].item() == pytest.approx(given[counted & mask].double().mean().item())
    # Id 5 is never a label, so it is not among those that the mean is taken of.
    by_id = [(answers[labels == i] == i).double().mean().item() for i in range(5)]
    assert values["class_accuracy"].item() == pytest.approx(np.mean(by_id))
    assert values["class_accuracy"].item() != pytest.approx(values["accuracy"].item())


def test_a_batch_without_its_sets_of_right_answers_is_refused():
    with pytest.raises(ValueError, match="no slice 'legal'"):
        TaskScore(legal=True).update(torch.zeros(1, 2).long(), torch.zeros(1, 2).long(), {})


@pytest.mark.parametrize("task", ["overwrite", "parity", "mqar", "arithmetic", "mad_fuzzy", "mad_memorize", "niah"])
def test_perfect_and_outdated_answers_are_told_apart(task):
    options = {"upd": 3} if task == "overwrite" else None
    module = TaskData(task, batch_tokens=40 * make_task(task).seq_len, options=options)
    perfect, outdated = module.new_score(), module.new_score()
    for batch in module.test_dataloader():
        old = torch.where(batch["stale"] != -100, batch["stale"], batch["labels"])
        perfect.update(batch["labels"], batch["labels"], batch["slices"], batch["stale"])
        outdated.update(old, batch["labels"], batch["slices"], batch["stale"])
    best = perfect.compute()
    assert best.pop("stale_rate", torch.tensor(0.0)) == 0
    assert len(best) >= 3
    assert all(value == 1 for value in best.values()), best
    if task == "overwrite":
        worst = outdated.compute()
        assert worst["accuracy"] == 0.5
        assert worst["stale_rate"] == 1
        assert (worst["kept/accuracy"], worst["overwritten/accuracy"], worst["exact"]) == (1, 0, 0)


def test_wrong_shapes_and_missing_slices_are_refused():
    score = TaskScore(["kept"])
    with pytest.raises(ValueError, match=r"answers are \[1, 2\] and labels \[1, 3\]"):
        score.update(torch.zeros(1, 2), torch.zeros(1, 3))
    with pytest.raises(ValueError, match="no slice 'kept'"):
        score.update(torch.zeros(1, 2), torch.zeros(1, 2))


# -------------------------------------------------------------------------------------------------------------- entropy
def test_entropies_of_texts_whose_entropy_is_known():
    assert unigram_entropy(np.array([5])) == 0
    assert unigram_entropy(np.tile([0, 1, 2, 3], 10)) == pytest.approx(2)
    assert unigram_entropy(np.array([0, 0, 0, 1])) == pytest.approx(0.75 * math.log2(4 / 3) + 0.25 * 2)
    assert bigram_conditional_entropy(np.tile([0, 1, 2, 3], 10)) == pytest.approx(0)
    # 00 01 10 01 10 00 01 11: after 0 comes 0 twice and 1 three times, after 1 comes 0 twice and 1 once.
    tokens = np.array([0, 0, 1, 0, 1, 0, 0, 1, 1])
    after_zero = 2 / 5 * math.log2(5 / 2) + 3 / 5 * math.log2(5 / 3)
    after_one = 2 / 3 * math.log2(3 / 2) + 1 / 3 * math.log2(3)
    assert bigram_conditional_entropy(tokens) == pytest.approx(5 / 8 * after_zero + 3 / 8 * after_one)


def test_entropies_of_long_random_text_come_near_the_truth(dice):
    random_text = np.random.default_rng(dice.randrange(2**31)).integers(0, 16, 200_000)
    assert unigram_entropy(random_text) == pytest.approx(4, abs=0.001)
    assert bigram_conditional_entropy(random_text) == pytest.approx(4, abs=0.003)
    with pytest.raises(ValueError, match="no tokens"):
        unigram_entropy(np.array([]))
    with pytest.raises(ValueError, match="a pair needs 2 tokens, 1 given"):
        bigram_conditional_entropy(np.array([1]))


def test_the_entropy_of_answers_is_that_of_all_answers_though_each_is_seen_a_few_times():
    drawn = np.random.default_rng(0).integers(0, 4096, 25_000)
    assert answer_entropy(drawn) == pytest.approx(math.log(4096), abs=0.01)
    assert unigram_entropy(drawn) * math.log(2) < math.log(4096) - 0.06
    assert answer_entropy(np.zeros(5, dtype=np.int64)) == 0
    with pytest.raises(ValueError, match="no tokens"):
        answer_entropy(np.array([]))
