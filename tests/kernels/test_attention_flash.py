"""The backends flash2 and flash4: what they ask of the libraries, when they refuse, and that compilers see one node."""

import sys
import warnings
from importlib.metadata import PackageNotFoundError
from types import ModuleType

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from zoo_kernels import backend as table
from zoo_kernels.accuracy import limit, relative_error
from zoo_kernels.attention import attention, flash, flash2, flash4
from zoo_kernels.attention.op import checked_call
from zoo_kernels.packing import Packing

FLASH = ["flash2", "flash4"]


# ----------------------------------------------------------------------------- libraries that compute by their contract
def weights(q, k, scale, left, right):
    """Rows as flash-attn defines them: query t sees t - left <= s <= t + right; None is no bound. [B, H, T, S]."""
    back = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
    seen = (back <= (len(back) if left is None else left)) & (back >= -(len(back) if right is None else right))
    return (torch.einsum("bthd,bshd->bhts", q, k) * scale).masked_fill(~seen, -torch.inf).softmax(-1)


def spread(q, *tensors):
    return [x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in tensors]


def dense(q, k, v, scale, left, right):
    k, v = spread(q, k, v)
    return torch.einsum("bhts,bshd->bthd", weights(q, k, scale, left, right), v).contiguous()


def dense_gradients(dy, q, k, v, scale, left, right):
    """By hand: a custom op's body records no graph."""
    kv_heads = k.shape[2]
    k, v = spread(q, k, v)
    p = weights(q, k, scale, left, right)
    dp = torch.einsum("bthd,bshd->bhts", dy, v)
    ds = scale * p * (dp - (p * dp).sum(-1, keepdim=True))
    dk, dv = torch.einsum("bhts,bthd->bshd", ds, q), torch.einsum("bhts,bthd->bshd", p, dy)
    dk, dv = (x.unflatten(2, (kv_heads, -1)).sum(3) for x in (dk, dv))
    return torch.einsum("bhts,bshd->bthd", ds, k).contiguous(), dk.contiguous(), dv.contiguous()


def by_contract(function, tensors, cu_seqlens, *rule):
    """One result, or one for each of q, k and v; of rows, or of documents end to end."""
    if cu_seqlens is None:
        return function(*tensors, *rule)
    parts = [x[None].split(cu_seqlens.diff().tolist(), dim=1) for x in tensors]
    results = [function(*part, *rule) for part in zip(*parts)]
    if function is dense:
        return torch.cat(results, 1)[0]
    return tuple(torch.cat(result, 1)[0] for result in zip(*results))


def log_sum_exp(q):
    *batch, tokens, heads, _ = q.shape
    return q.new_zeros((*batch, heads, tokens), dtype=torch.float32)


def flash_attn_2(told):
    """flash_attn 2.8.3 as far as it is called; appends (pass, tensors' shapes, settings) to ``told``."""

    def rule(cu_seqlens, settings):
        assert settings.pop("causal")
        assert settings.pop("dropout_p") == settings.pop("softcap") == 0.0
        assert settings.pop("alibi_slopes") is None
        left, right = (None if n < 0 else n for n in (settings["window_size_left"], settings["window_size_right"]))
        return cu_seqlens, settings["softmax_scale"], left, right

    def forward(q, k, v, cu_seqlens=None, *, return_softmax, **settings):
        told.append(("forward", [q.shape, k.shape, v.shape], settings))
        assert return_softmax is False
        return (
            by_contract(dense, (q, k, v), *rule(cu_seqlens, settings)),
            log_sum_exp(q),
            torch.empty(0),
            torch.empty(2),
        )

    def backward(dy, q, k, v, y, lse, dq, dk, dv, cu_seqlens=None, *, deterministic, **settings):
        told.append(("backward", [q.shape, k.shape, v.shape], settings))
        assert deterministic
        assert lse.shape == log_sum_exp(q).shape
        found = by_contract(dense_gradients, (dy, q, k, v), *rule(cu_seqlens, settings))
        for out, gradient in zip((dq, dk, dv), found):
            out.copy_(gradient)
        return lse

    def packed(launch):
        def run(*tensors, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **settings):
            check_offsets(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
            return launch(*tensors, cu_seqlens=cu_seqlens_q, **settings)

        return run

    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    package.__version__, package.__path__ = "2.8.3", []
    interface._flash_attn_forward, interface._flash_attn_varlen_forward = forward, packed(forward)
    interface._flash_attn_backward, interface._flash_attn_varlen_backward = backward, packed(backward)
    return {"flash_attn": package, interface.__name__: interface}


def flash_attn_4(told):
    """flash_attn.cute of flash-attn-4 4.0.0b36 as far as it is called."""

    def rule(settings):
        assert settings.pop("causal")
        offsets = [settings.pop(f"cu_seqlens_{x}") for x in "qk"]
        longest = [settings.pop(f"max_seqlen_{x}") for x in "qk"]
        if offsets[0] is None:
            assert longest == [None, None]
        else:
            check_offsets(*offsets, *longest)
        left, right = settings["window_size_left"], settings["window_size_right"]
        assert (left is None) == (right is None)
        return offsets[0], settings["softmax_scale"], left, 0

    def forward(q, k, v, *, return_lse, **settings):
        warnings.warn("Arch from arch.py is deprecated", DeprecationWarning, stacklevel=1)  # as each compilation does
        told.append(("forward", [q.shape, k.shape, v.shape], settings))
        assert return_lse
        return by_contract(dense, (q, k, v), *rule(settings)), log_sum_exp(q), None, None, None

    def backward(q, k, v, y, dy, lse, *, deterministic, **settings):
        told.append(("backward", [q.shape, k.shape, v.shape], settings))
        assert deterministic
        assert lse.shape == log_sum_exp(q).shape
        return by_contract(dense_gradients, (dy, q, k, v), *rule(settings))

    package, interface = ModuleType("flash_attn.cute"), ModuleType("flash_attn.cute.interface")
    interface._flash_attn_fwd, interface._flash_attn_bwd = forward, backward
    return {"flash_attn": ModuleType("flash_attn"), package.__name__: package, interface.__name__: interface}


def check_offsets(cu_q, cu_k, longest_q, longest_k):
    assert cu_q is cu_k
    assert cu_q.dtype == torch.int32
    assert longest_q == longest_k == cu_q.diff().max()


@pytest.fixture(autouse=True)
def ask_again():
    """What was found of the packages is kept for a process; a test that changes them must not leave its answer."""
    for module in (flash2, flash4):
        module._found.cache_clear()
    yield
    for module in (flash2, flash4):
        module._found.cache_clear()


@pytest.fixture
def on_hopper(monkeypatch):
    """Tensors on the CPU pass for half precision on a Hopper GPU."""
    for module in (flash2, flash4):
        monkeypatch.setattr(module, "flash_refusal", lambda call, largest=256: None)
        monkeypatch.setattr(module, "capability", lambda device: (9, 0))


@pytest.fixture(params=FLASH)
def library(request, monkeypatch, on_hopper):
    """(name of a backend whose library computes by contract, what the library was told)."""
    told = []
    modules = {"flash2": flash_attn_2, "flash4": flash_attn_4}[request.param](told)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(flash4, "version", lambda name: flash4.OLDEST)
    return request.param, told


def draw(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


CASES = {
    "full": (None, None, (2, 40)),
    "window": (7, None, (2, 40)),
    "window of one": (1, None, (1, 9)),
    "one token": (None, None, (3, 1)),
    "packed": (None, [0, 13, 13, 40], (1, 40)),
    "packed, window": (7, [0, 5, 40, 40], (1, 40)),
}


@pytest.mark.parametrize(("heads", "kv_heads", "size", "v_size"), [(2, 2, 8, 8), (6, 2, 5, 3), (4, 1, 64, 80)])
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_the_reference_s(library, case, heads, kv_heads, size, v_size):
    window, offsets, rows = CASES[case]
    inputs = draw((*rows, heads, size), (*rows, kv_heads, size), (*rows, kv_heads, v_size))
    given = {"window": window, "packing": offsets, "scale": 0.3}
    y, expected = (attention(*inputs, **given, backend=name) for name in (library[0], "math"))
    dy = draw(y.shape, seed=1)[0].detach()
    results = [(y, expected), *zip(torch.autograd.grad(y, inputs, dy), torch.autograd.grad(expected, inputs, dy))]
    for quantity, (got, wanted) in zip(("y", "dq", "dk", "dv"), results):
        if wanted.abs().max() < 1e-12:  # a softmax over one key is constant
            assert got.abs().max() < 1e-12, quantity
        else:
            assert relative_error(got, wanted) <= limit(quantity, torch.float64), quantity


def test_the_library_is_told_the_window_without_the_query_itself_and_never_gets_repeated_heads(library):
    name, told = library
    inputs = draw((1, 40, 6, 64), (1, 40, 2, 64), (1, 40, 2, 64))
    window = ("window_size_left", "window_size_right")
    for offsets in (None, [0, 13, 40]):
        for size in (None, 12):
            attention(*inputs, window=size, packing=offsets, backend=name).sum().backward()
            for passed, shapes, settings in told:
                assert [shape[-2:] for shape in shapes] == [(6, 64), (2, 64), (2, 64)], passed
                assert len(shapes[0]) == (4 if offsets is None else 3)
                assert settings["softmax_scale"] == 64**-0.5
                none = {"flash2": (-1, 0), "flash4": (None, None)}[name]
                assert tuple(settings[side] for side in window) == (none if size is None else (11, 0)), passed
            assert [passed for passed, *_ in told] == ["forward", "backward"]
            told.clear()


def test_flash4_lengthens_heads_to_sizes_that_it_keeps_kernels_for(library):
    name, told = library
    for size, v_size, kept in ((8, 8, 64), (64, 65, 96), (128, 128, 128), (130, 100, 192), (200, 256, 256)):
        attention(*draw((1, 3, 1, size), (1, 3, 1, size), (1, 3, 1, v_size)), backend=name)
        (_, shapes, _) = told.pop()
        assert shapes[0][-1] == (kept if name == "flash4" else max(size, v_size))


# ------------------------------------------------------------------------------------------------------------ one node
@pytest.mark.parametrize("case", CASES)
def test_the_op_keeps_the_rules_of_custom_ops(library, case):
    name, _ = library
    window, offsets, rows = CASES[case]
    q, k, v = draw((*rows, 4, 8), (*rows, 2, 8), (*rows, 2, 8))
    longest, cu_seqlens = rows[1], None
    if offsets is not None:
        q, k, v = (x.detach()[0].requires_grad_() for x in (q, k, v))
        packing = Packing.from_offsets(offsets)
        longest, cu_seqlens = packing.max_length, packing.cu_seqlens
    torch.library.opcheck(flash.flash_attention, (q, k, v, cu_seqlens, longest, window, 0.5, name))


def through(backend, window, packing):
    def function(q, k, v):
        return attention(q, k, v, window=window, packing=packing, backend=backend)

    return function


@pytest.mark.parametrize("offsets", [None, [0, 13, 40]])
@pytest.mark.parametrize("window", [None, 9])
def test_a_compiled_call_is_one_graph_with_the_eager_numbers(library, window, offsets):
    name, _ = library
    inputs = draw((1, 40, 4, 8), (1, 40, 2, 8), (1, 40, 2, 8))
    packing = None if offsets is None else Packing.from_offsets(offsets)
    function = through(name, window, packing)
    function(*inputs)  # a packing keeps its lengths once they were asked for, and Python 3.11 locks while it does
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    results = []
    for call in (compiled, function):
        y = call(*inputs)
        results.append([y, *torch.autograd.grad(y, inputs, torch.ones_like(y))])
    for got, expected in zip(*results):
        assert relative_error(got, expected) <= 1e-10


def test_a_checkpointed_call_has_the_same_gradients(library):
    name, told = library
    inputs = draw((1, 40, 4, 8), (1, 40, 2, 8), (1, 40, 2, 8))
    function = through(name, 9, None)
    plain = torch.autograd.grad(function(*inputs).square().sum(), inputs)
    told.clear()
    again = torch.autograd.grad(checkpoint(function, *inputs, use_reentrant=False).square().sum(), inputs)
    assert [passed for passed, *_ in told] == ["forward", "forward", "backward"]
    for got, expected in zip(again, plain):
        assert torch.equal(got, expected)


def test_autocast_changes_nothing(library):
    inputs = [x.detach().float().requires_grad_() for x in draw((1, 40, 4, 8), (1, 40, 2, 8), (1, 40, 2, 8))]
    function = through(library[0], 9, None)
    plain = function(*inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(function(*inputs), plain)


@pytest.mark.parametrize(
    ("window", "offsets", "pairs"), [(None, None, 40 * 40), (9, None, 40 * 9), (9, [0, 5, 40], 5 * 5 + 35 * 9)]
)
def test_flops_are_counted_forward_and_backward(library, window, offsets, pairs):
    inputs = draw((1, 40, 4, 64), (1, 40, 2, 64), (1, 40, 2, 64))
    with FlopCounterMode(display=False) as counter:
        y = attention(*inputs, window=window, packing=offsets, backend=library[0])
    assert counter.get_total_flops() == 2 * 2 * pairs * 4 * 64
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    assert counter.get_total_flops() == 5 * 2 * pairs * 4 * 64


# ------------------------------------------------------------------------------------------------------------- reasons
def refuse(name, message, dtype=torch.float32, size=8, v_size=8):
    shape = (1, 8, 2, size)
    q, k, v = (
        torch.zeros(shape, dtype=dtype),
        torch.zeros(shape, dtype=dtype),
        torch.zeros(1, 8, 2, v_size, dtype=dtype),
    )
    reasons = dict(table.explain("attention", checked_call(q, k, v)))
    assert message in reasons[name]
    with pytest.raises(ValueError, match=f"'{name}' cannot serve this call"):
        attention(q, k, v, backend=name)


@pytest.mark.parametrize("name", FLASH)
def test_tensors_on_the_cpu_are_refused(name):
    refuse(name, "it runs on CUDA, and the tensors are on cpu")


@pytest.mark.parametrize("name", FLASH)
def test_an_absent_package_is_named(name, on_hopper, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)

    def version(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr(flash4, "version", version)
    refuse(name, {"flash2": "flash-attn 2.x is not installed", "flash4": "flash-attn-4 is not installed"}[name])


def test_the_bare_folder_that_flash_attn_4_leaves_is_no_flash_attn_2(on_hopper, monkeypatch):
    bare = ModuleType("flash_attn")
    bare.__path__ = []
    monkeypatch.setitem(sys.modules, "flash_attn", bare)
    monkeypatch.delitem(sys.modules, "flash_attn.flash_attn_interface", raising=False)
    refuse("flash2", "flash-attn 2.x is not installed")


@pytest.mark.parametrize("found", ["2.6.3", "3.0.0"])
def test_another_version_of_flash_attn_is_refused(library, monkeypatch, found):
    monkeypatch.setattr(sys.modules["flash_attn"], "__version__", found, raising=False)
    if library[0] == "flash2":
        refuse("flash2", f"flash-attn {found} is installed, and versions from 2.7.0 up to 3 are used")


def test_another_version_of_flash_attn_4_is_refused(library, monkeypatch):
    if library[0] == "flash4":
        monkeypatch.setattr(flash4, "version", lambda name: "4.0.0b5")
        refuse("flash4", "flash-attn-4 4.0.0b5 is installed, and 4.0.0b36 is the first that is used")
        flash4._found.cache_clear()
        monkeypatch.setattr(flash4, "version", lambda name: "4.1.0")
        monkeypatch.delattr(sys.modules["flash_attn.cute.interface"], "_flash_attn_bwd")
        refuse("flash4", "flash-attn-4 4.1.0 has no _flash_attn_bwd")


@pytest.mark.parametrize("name", FLASH)
def test_a_package_that_does_not_import_says_so(name, on_hopper, monkeypatch):
    def broken(module):
        raise OSError("undefined symbol: _ZN3c10")

    for module in (flash2, flash4):
        monkeypatch.setattr(module, "_interface", lambda: broken(None))
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setattr(flash4, "version", lambda package: flash4.OLDEST)
    refuse(name, "is installed, but does not import: OSError: undefined symbol: _ZN3c10")


class OnHopper(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("name", FLASH)
def test_dtype_head_size_and_device_are_named(name, monkeypatch):
    module = {"flash2": flash2, "flash4": flash4}[name]
    serves = module.__dict__[name.capitalize()]().serves

    def reason(dtype, size, capability):
        monkeypatch.setattr(module, "capability", lambda device: capability)
        q = torch.zeros(1, 8, 2, size, dtype=dtype).as_subclass(OnHopper)
        return serves(checked_call(q, q, q))

    assert "computes bfloat16 and float16 only" in reason(torch.float32, 64, (9, 0))
    assert reason(torch.bfloat16, 264, (9, 0)) == "heads of 264 exceed its limit of 256"
    assert "compute capabilit" in reason(torch.bfloat16, 64, (7, 5))
    if name == "flash4":
        assert "this GPU has 8.0" in reason(torch.bfloat16, 64, (8, 0))
        assert reason(torch.bfloat16, 192, (10, 0)) == "heads of 192 exceed its limit of 128"


# ------------------------------------------------------------------------------------------------------------ on a GPU
SHAPES = {"64, groups of 4": (8, 2, 64), "128": (4, 4, 128), "256, groups of 2": (4, 2, 256)}
KERNELS = ["sdpa", "varlen", "flash4", "flash2", "blocks"]


def on_cuda(name, heads, kv_heads, size, window, offsets, dtype=torch.bfloat16, tokens=1000):
    """q, k, v on the GPU; skips where the named backend cannot serve them."""
    shapes = [(1, tokens, heads, size), (1, tokens, kv_heads, size), (1, tokens, kv_heads, size)]
    inputs = [x.detach().to("cuda", dtype).requires_grad_() for x in draw(*shapes)]
    packing = None if offsets is None else Packing.from_offsets(offsets).to("cuda")
    reasons = {
        b.name: b.serves(checked_call(*inputs, window=window, packing=packing)) for b in table.backends("attention")
    }
    if reasons[name] is not None:
        pytest.skip(reasons[name])
    return inputs, packing


@pytest.mark.gpu
@pytest.mark.parametrize("offsets", [None, [0, 130, 130, 131, 1000]], ids=["rows", "packed"])
@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", KERNELS)
def test_each_importable_backend_equals_float64_on_cuda(name, shape, window, offsets):
    inputs, packing = on_cuda(name, *SHAPES[shape], window, offsets)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    y = attention(*inputs, window=window, packing=packing, backend=name)
    expected = attention(*exact, window=window, packing=packing, backend="math")
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y)
    found = [(y, expected)]
    found += zip(torch.autograd.grad(y, inputs, dy), torch.autograd.grad(expected, exact, dy.double()))
    for quantity, (got, wanted) in zip(("y", "dq", "dk", "dv"), found):
        assert relative_error(got, wanted) <= limit(quantity, torch.bfloat16), quantity


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("name", KERNELS)
def test_the_window_of_each_importable_backend_ends_where_it_should(name, size):
    (q, k, v), _ = on_cuda(name, 4, 2, size, 300, None)
    with torch.no_grad():
        y = attention(q, k, v, window=300, backend=name)
        for changed, sees in ((599, False), (600, True), (899, True), (900, False)):
            other = v.clone()
            other[:, changed] += 64.0
            again = attention(q, k, other, window=300, backend=name)
            assert torch.equal(again[:, 899], y[:, 899]) != sees, changed


@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNELS)
def test_no_importable_backend_lets_documents_meet(name):
    offsets = [0, 130, 130, 131, 1000]
    inputs, packing = on_cuda(name, 8, 2, 64, 200, offsets)
    changed = [x.detach().clone() for x in inputs]
    for x in changed:
        x[:, 130:131] = 300.0
        x.requires_grad_()
    before, after = (attention(*x, window=200, packing=packing, backend=name) for x in (inputs, changed))
    dy = torch.ones_like(before)
    others = [t for t in range(1000) if t != 130]
    assert torch.equal(before[:, others], after[:, others])
    if name in FLASH:  # the others add dq in any order
        for one, other in zip(torch.autograd.grad(before, inputs, dy), torch.autograd.grad(after, changed, dy)):
            assert torch.equal(one[:, others], other[:, others])


@pytest.mark.gpu
@pytest.mark.parametrize("offsets", [None, [0, 130, 130, 131, 1000]], ids=["rows", "packed"])
@pytest.mark.parametrize("name", FLASH)
def test_repeats_are_bitwise_equal_on_cuda(name, offsets):
    inputs, packing = on_cuda(name, 8, 2, 64, 200, offsets)
    first = None
    for _ in range(100):
        y = attention(*inputs, window=200, packing=packing, backend=name)
        found = [y, *torch.autograd.grad(y, inputs, torch.ones_like(y))]
        first = first or found
        assert all(torch.equal(got, kept) for got, kept in zip(found, first))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("name", ["sdpa", "varlen", "flash4", "flash2"])
def test_a_compiled_call_on_cuda_is_one_graph_with_the_eager_numbers(name, window):
    inputs, _ = on_cuda(name, 8, 2, 64, window, None)
    function = through(name, window, None)
    torch._dynamo.reset()
    results = []
    for call in (torch.compile(function, backend="aot_eager", fullgraph=True), function):
        y = call(*inputs)
        results.append([y, *torch.autograd.grad(y, inputs, torch.ones_like(y))])
    for quantity, got, expected in zip(("y", "dq", "dk", "dv"), *results):
        assert relative_error(got, expected) <= limit(quantity, torch.bfloat16), quantity
