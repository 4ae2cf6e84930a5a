"""One safetensors file of a checkpoint: the same model, loaded strictly, with its record inside and beside."""

import json
import sys

import pytest
import torch

from zoo.checkpoint import consolidate, load_model
from zoo.cli import Parser
from zoo.errors import UserError
from zoo.module import HybridLMModule
from zoo.verbs import consolidate as verb
from zoo_layers.mixer import registered

safetensors = pytest.importorskip("safetensors.torch")
IDS = torch.arange(24).reshape(2, 12)


def checkpoint(path, **settings):
    """A checkpoint of a model that was never trained."""
    module = HybridLMModule(**{"pattern": "GDN,SWA", "d_model": 32, "vocab_size": 31, **settings})
    module.configure_model()
    content = {"state_dict": module.state_dict()}
    module.on_save_checkpoint(content)
    torch.save(content, path)
    return path


def run(*words):
    parser = Parser("zoo consolidate", "")
    verb.add_arguments(parser)
    return verb.run(parser.read([str(word) for word in words]))


@pytest.mark.parametrize("settings", [{}, {"tie": True}, {"pattern": ",".join(registered())}], ids=str)
def test_the_file_alone_rebuilds_the_model(tmp_path, capsys, settings):
    source, out = checkpoint(tmp_path / "last.ckpt", **settings), tmp_path / "out" / "model.safetensors"
    assert run(tmp_path, "--out", out) == 0
    assert "parameters, 0 tokens seen" in capsys.readouterr().out
    source_model, loaded = load_model(source), load_model(out)
    assert loaded.facts == source_model.facts
    assert json.loads(out.with_suffix(".json").read_text()) == loaded.facts
    assert loaded.architecture == source_model.architecture
    torch.testing.assert_close(loaded.model(IDS), source_model.model(IDS), rtol=0, atol=0)
    stored = safetensors.load_file(out)
    assert ("head.weight" in stored) != bool(settings.get("tie"))
    assert (loaded.model.head.weight is loaded.model.embedding.weight) == bool(settings.get("tie"))


def test_a_type_may_be_asked_for_and_rates_stay_exact(tmp_path):
    source, out = checkpoint(tmp_path / "last.ckpt"), tmp_path / "model.safetensors"
    run(source, "--out", out, "--dtype", "bfloat16")
    kinds = {name: tensor.dtype for name, tensor in safetensors.load_file(out).items()}
    exact = {name for name, dtype in kinds.items() if dtype == torch.float32}
    assert exact == {"blocks.0.mixer.A_log", "blocks.0.mixer.dt_bias"}
    assert {kinds[name] for name in kinds.keys() - exact} == {torch.bfloat16}


def test_a_missing_tensor_is_named_and_not_filled(tmp_path):
    source, out = checkpoint(tmp_path / "last.ckpt"), tmp_path / "model.safetensors"
    loaded = consolidate(source, out)
    tensors = {k: v for k, v in safetensors.load_file(out).items() if k != "blocks.1.mlp.to_down.weight"}
    safetensors.save_file(tensors, tmp_path / "less.safetensors", metadata={"zoo": json.dumps(loaded.facts)})
    with pytest.raises(UserError, match=r"(?s)do not fit the model it names.*blocks\.1\.mlp\.to_down\.weight"):
        load_model(tmp_path / "less.safetensors")


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    source = checkpoint(tmp_path / "last.ckpt")
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(UserError, match=r"pip install 'hybrid-zoo\[safetensors\]'"):
        run(source, "--out", tmp_path / "model.safetensors")
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_wrong_input_is_named(tmp_path):
    source, out = checkpoint(tmp_path / "last.ckpt"), tmp_path / "model.safetensors"
    with pytest.raises(UserError, match=r"must end in \.safetensors"):
        run(source, "--out", tmp_path / "model.bin")
    with pytest.raises(UserError, match="no checkpoint at"):
        run(tmp_path / "nowhere", "--out", out)
    with pytest.raises(UserError, match="--out"):
        run(source)
    run(source, "--out", out)
    with pytest.raises(UserError, match="it exists already"):
        run(source, "--out", out)
    out.write_bytes(out.read_bytes()[:-100])
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        load_model(out)
    safetensors.save_file({"x": torch.ones(1)}, tmp_path / "foreign.safetensors")
    with pytest.raises(UserError, match="does not come from zoo consolidate"):
        load_model(tmp_path / "foreign.safetensors")
