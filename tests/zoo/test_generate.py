"""Sampling: seeds, lengths, stop ids, and a prompt's answer that does not depend on its neighbours."""

import pytest
import torch

from zoo.cli import main
from zoo.errors import UserError
from zoo.generate import generate
from zoo.model import HybridLM

PATTERN = "M2,GDN,SWA:window=3,GA"
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [5], [2, 9]]


@pytest.fixture(scope="module")
def model():
    return HybridLM.from_pattern(PATTERN, d_model=32, vocab_size=19, d_ff=16, seed=3).double()


def by_hand(model, prompt, count):
    """The whole sequence again for every new token, without any cache."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model.eval()(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def test_greedy_answers_equal_full_forwards_for_prompts_of_every_length_at_once(model):
    assert generate(model, PROMPTS, max_new_tokens=9, temperature=0) == [by_hand(model, p, 9) for p in PROMPTS]


def test_the_other_prompts_and_their_padding_change_nothing(model):
    alone = [generate(model, [p], max_new_tokens=5, temperature=0)[0] for p in PROMPTS]
    padded = torch.tensor([[0, 0, 5], [0, 2, 9]])
    mask = torch.tensor([[0, 0, 1], [0, 1, 1]])
    assert generate(model, PROMPTS, max_new_tokens=5, temperature=0) == alone
    assert generate(model, padded, attention_mask=mask, max_new_tokens=5, temperature=0) == alone[1:]
    assert generate(model, padded + 7 * (1 - mask), attention_mask=mask, max_new_tokens=5, temperature=0) == alone[1:]


def test_a_seed_fixes_the_draws_and_another_changes_them(model):
    first = generate(model, PROMPTS, max_new_tokens=12, seed=4)
    assert generate(model, PROMPTS, max_new_tokens=12, seed=4) == first
    assert generate(model, PROMPTS, max_new_tokens=12, seed=5) != first


def test_two_equal_prompts_get_draws_of_their_own(model):
    one, other = generate(model, [[1, 2], [1, 2]], max_new_tokens=12)
    assert one != other


@pytest.mark.parametrize("count", [0, 1, 2])
def test_exactly_so_many_tokens_are_new(model, count):
    assert [len(new) for new in generate(model, PROMPTS, max_new_tokens=count)] == [count] * 3


def test_a_row_ends_behind_a_stop_id_and_the_others_go_on(model):
    plain = generate(model, PROMPTS, max_new_tokens=8, temperature=0)
    stop = plain[0][2]
    stopped = generate(model, PROMPTS, max_new_tokens=8, temperature=0, stop_ids=[stop])
    for before, after in zip(plain, stopped):
        end = before.index(stop) + 1 if stop in before else 8
        assert after == before[:end]


def test_top_k_of_one_is_greedy(model):
    greedy = generate(model, PROMPTS, max_new_tokens=6, temperature=0)
    assert generate(model, PROMPTS, max_new_tokens=6, top_k=1) == greedy


def test_the_model_is_left_in_the_mode_it_was_in_also_after_an_error(model):
    model.train()
    generate(model, PROMPTS, max_new_tokens=1)
    assert model.training
    with pytest.raises(ValueError, match="outside 0"):
        generate(model, [[99]], max_new_tokens=1)
    assert model.training


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1]], {"max_new_tokens": -1}, "max_new_tokens must be at least 0"),
        ([[1]], {"temperature": -0.5}, "temperature must be at least 0"),
        ([[1]], {"top_k": 0}, "top_k must be at least 1"),
        (torch.tensor([[1, 0]]), {"attention_mask": torch.tensor([[1, 0]])}, "padded on the right"),
        ([[1]], {"attention_mask": torch.tensor([[1]])}, "need no attention_mask"),
        (torch.tensor([1]), {}, r"must be \[N, T\]"),
    ],
)
def test_wrong_input_is_named(model, prompts, settings, message):
    with pytest.raises(UserError, match=message):
        generate(model, prompts, **{"max_new_tokens": 2, **settings})


def test_the_verb_continues_a_prompt_from_a_checkpoint_and_repeats_itself(zoo, tmp_path, capsys):
    zoo("fit", "--trainer.max_steps", "2")
    words = [
        "generate",
        "--ckpt",
        str(tmp_path / "run"),
        "--prompt",
        "document",
        "--max_new_tokens",
        "5",
        "--seed",
        "7",
    ]
    capsys.readouterr()
    assert main(words) == 0
    first = capsys.readouterr().out
    assert main(words) == 0
    assert capsys.readouterr().out == first
    assert first.startswith("document")


@pytest.mark.parametrize("kind", ["missing", "cut short", "another file"])
def test_the_verb_says_what_is_wrong_with_a_checkpoint(zoo, tmp_path, capsys, kind):
    path = tmp_path / "x.ckpt"
    if kind == "cut short":
        zoo("fit", "--trainer.max_steps", "1")
        path.write_bytes((tmp_path / "run" / "last.ckpt").read_bytes()[:5000])
    elif kind == "another file":
        torch.save({"weights": torch.zeros(3)}, path)
    capsys.readouterr()
    assert main(["generate", "--ckpt", str(path), "--prompt", "x"]) == 2
    message = capsys.readouterr().err
    assert str(path) in message
    assert "Traceback" not in message
