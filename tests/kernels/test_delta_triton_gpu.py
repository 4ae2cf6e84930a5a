"""The Triton kernels of the delta rule on a GPU: a covering set of cases, every launch, repeats, compilations."""

import os
import random
import subprocess
import sys
from dataclasses import replace
from itertools import combinations, product

import pytest
import torch

from tests.kernels.delta_cases import CUDA, INPUTS, Case, assert_equal, check, errors, filled, limits, run, truth
from tests.waits import no_waits
from zoo_kernels import device
from zoo_kernels.accuracy import limit, relative_error
from zoo_kernels.delta import delta_rule
from zoo_kernels.launch import TABLES, Row, force
from zoo_kernels.packing import Packing

if device.triton_missing() is not None:
    pytest.skip("Triton cannot run here", allow_module_level=True)

from zoo_kernels.delta import recurrent_triton
from zoo_kernels.delta.triton_backend import keep_states
from zoo_kernels.launches import MEASURED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]


@pytest.fixture(autouse=True)
def room():
    """Memory of the last test goes back, since several processes may share the GPU."""
    yield
    torch.cuda.empty_cache()


# --------------------------------------------------------------------------------------------------------- covering set
SEED = 20240613  # what the covering set is drawn from
MOST_CASES = 150
# Numbers of float64 that a case's truth may hold per tensor of states: 2 GiB.
MOST_NUMBERS = 2**28
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

FACTORS = {
    "T": [1, 63, 64, 65, 127, 500, 2049],
    "sizes": [(16, 16), (64, 64), (100, 100), (128, 64), (128, 128), (128, 256), (192, 384), (200, 400), (256, 512)],
    "group": [1, 2, 4, 64],
    "decay": ["none", "weak", "-8", "constant", "channel weak", "channel -8"],
    "beta": [None, (0.0, 0.02), (0.95, 1.0), (1.98, 2.0)],
    "keys": ["random", "positive", "repeated"],
    "packed": [False, True],
    "state": [False, True],
    "kept": [False, True],  # states that enter chunks, for the backward
    "dtype": [(BF16, FP32), (BF16, BF16), (BF16, FP32, "again"), (FP16, FP32), (FP32, FP32)],  # of inputs, of gates
}
HEADS = {1: (2, 1), 2: (2, 2), 4: (1, 4), 64: (1, 64)}  # H and value heads of each
MEMBER = {
    ("none", False): "LA",
    ("none", True): "DN",
    ("head", False): "M2",
    ("head", True): "GDN",
    ("constant", False): "RET",
    ("constant", True): "RET, erasing",
    ("channel", False): "GLA",
    ("channel", True): "KDA",
}


def fits(row: dict) -> bool:
    """Whether the truth of a case fits the memory, whatever is still open in ``row``."""
    H, group = HEADS[row.get("group", 1)]
    K, V = row.get("sizes", (1, 1))
    return 2 * (row.get("T", 1) // 16 + 1) * H * group * K * V <= MOST_NUMBERS


def covering(factors: dict[str, list], seed: int) -> list[dict]:
    """Rows in which every two values of two factors meet that may: greedy, the best of some candidates at a time."""
    draw = random.Random(seed)
    names = list(factors)

    def meetings(row):
        return {frozenset(pair) for pair in combinations(row.items(), 2)}

    def whole(start):
        """A row around ``start``: the other factors in random order, each at the value with the most new meetings."""
        row = dict(start)
        for name in draw.sample([name for name in names if name not in row], len(names) - len(row)):
            values = [v for v in draw.sample(factors[name], len(factors[name])) if fits(row | {name: v})]
            row[name] = max(values, key=lambda v: sum(frozenset([(name, v), x]) in left for x in row.items()))
        return {name: row[name] for name in names}

    items = [[(name, value) for value in factors[name]] for name in names]
    left = {frozenset(pair) for one, other in combinations(items, 2) for pair in product(one, other)}
    rows = []
    while left:
        start = min(left, key=lambda pair: sorted(map(str, pair)))
        candidates = [whole(start) for _ in range(15)]
        rows.append(max(candidates, key=lambda row: len(meetings(row) & left)))
        left -= meetings(rows[-1])
    return rows


def case_of(row: dict, seed: int) -> Case:
    """The case that a row of the covering set describes."""
    H, group = HEADS[row["group"]]
    shape, _, strength = row["decay"].rpartition(" ")
    kind = row["decay"] if row["decay"] in ("none", "constant") else shape or "head"
    T = row["T"]
    # Empty documents first, twice in the middle and last; one of one token where there are several.
    packing = (0, 0, T // 3, T // 3, T // 3, max(T // 3, T - 1), T, T) if row["packed"] else None
    return Case(
        MEMBER[kind, row["beta"] is not None],
        T=T,
        B=2,
        H=H,
        group=group,
        K=row["sizes"][0],
        V=row["sizes"][1],
        packing=packing,
        decay=(-8.0, -8.0) if strength == "-8" else (-0.1, 0.0),
        beta=row["beta"] or (0.0, 1.0),
        keys=row["keys"],
        state=row["state"],
        dtype=row["dtype"][0],
        gates=row["dtype"][1],
        device=CUDA,
        seed=seed,
    )


ROWS = covering(FACTORS, SEED)


def named(row: dict) -> str:
    """A test's name for a row."""
    words = [str(value).removeprefix("torch.") for value in row.values()]
    return "-".join(word.replace("torch.", "").replace(" ", "") for word in words) + f"-seed{SEED}"


def test_the_covering_set_is_small_and_misses_no_pair():
    assert len(ROWS) <= MOST_CASES, f"{len(ROWS)} cases from seed {SEED}"
    for one, other in combinations(FACTORS, 2):
        assert len({(str(row[one]), str(row[other])) for row in ROWS}) == len(FACTORS[one]) * len(FACTORS[other])


@pytest.mark.parametrize("index", range(len(ROWS)), ids=[named(row) for row in ROWS])
def test_every_pair_of_circumstances_agrees_with_the_truth(index):
    row = ROWS[index]
    case = case_of(row, seed=SEED + index)
    drawn = case.draw()
    with filled(torch.nan), keep_states(row["kept"]):
        got = run(drawn, backend="triton", **case.options())
    assert all(x.isfinite().all() for x in got.values()), {n: int((~x.isfinite()).sum()) for n, x in got.items()}
    expected = truth(case, drawn)
    found, most = errors(got, expected), limits(case, drawn, expected)
    worse = {name: f"{found[name]:.3g} > {most[name]:.3g}" for name in found if not found[name] <= most[name]}
    assert not worse, (case, worse)


# ------------------------------------------------------------------------------------------------------------- launches
def shipped() -> list[tuple[str, Row]]:
    """Every row of every table of the chunkwise kernels; test_delta_step.py has those of the others."""
    kernels = [name for name in TABLES if name.startswith("delta_")]
    kernels = [name for name in kernels if name not in (recurrent_triton.STEP, recurrent_triton.LOOP)]
    return [(kernel, row) for kernel in kernels for row in (*MEASURED.get(kernel, ()), *TABLES[kernel])]


@pytest.mark.parametrize(
    ("kernel", "row"), [pytest.param(*at, id=f"{at[0]}-{at[1].when or 'else'}") for at in shipped()]
)
def test_every_shipped_launch_gives_the_truth(kernel, row):
    if row.arch not in ("any", device.architecture(CUDA)):
        pytest.skip(f"this row is for {row.arch}")
    wanted = {name: value[-1] if isinstance(value, tuple) else value for name, value in row.when.items()}
    known = {"K": 128, "V": 128, "half": True, "aligned": True, "erases": True, "group": False} | wanted
    case = Case(
        ("KDA" if known["erases"] else "GLA") if "channel" in kernel else ("GDN" if known["erases"] else "M2"),
        T=700,  # one sequence of 11 chunks: it is split
        H=2,
        group=2 if known["group"] else 1,
        K=known["K"] - (0 if known["aligned"] else 4),
        V=known["V"],
        dtype=BF16 if known["half"] else FP32,
        device=CUDA,
    )
    assert row.fits(device.architecture(CUDA), known)
    with force(**{kernel: row.launch}):
        check(case)
        with keep_states(False):
            check(replace(case, packing=(0, 0, 70, 134, 199, 700)))


# -------------------------------------------------------------------------------------------------------------- repeats
@pytest.mark.parametrize("kept", [False, True], ids=["recomputed", "kept"])
@pytest.mark.parametrize("member", ["GDN", "M2", "KDA", "DN"])
def test_a_hundred_repeats_are_bit_equal(member, kept):
    sizes = {"group": 64, "V": 64} if member == "M2" else {"H": 4, "group": 2, "V": 128}
    drawn = Case(member, B=2, T=512, K=128, dtype=BF16, device=CUDA, **sizes).draw()
    with keep_states(kept):
        first = run(drawn, backend="triton")
        for _ in range(99):
            assert_equal(run(drawn, backend="triton"), first)


@pytest.mark.parametrize("member", ["GDN", "KDA", "LA"])
def test_repeats_of_a_split_scan_are_bit_equal(member):
    drawn = Case(member, T=3000, H=2, K=128, V=128, dtype=BF16, device=CUDA).draw()
    first = run(drawn, backend="triton")
    for _ in range(20):
        assert_equal(run(drawn, backend="triton"), first)


# --------------------------------------------------------------------------------------------------------- compilations
def compiled() -> int:
    """Kernels of the delta rule that were compiled so far."""
    modules = [module for name, module in sys.modules.items() if name.startswith("zoo_kernels.delta")]
    kernels = {id(x): x for module in modules for x in vars(module).values() if hasattr(x, "device_caches")}
    return sum(len(cache[0]) for kernel in kernels.values() for cache in kernel.device_caches.values())


@pytest.mark.parametrize("member", ["GDN", "DN", "M2", "KDA"])
def test_new_lengths_batches_and_packings_compile_nothing(member):
    def call(B, T, packing=None):
        case = Case(member, B=B, T=T, packing=packing, H=2, group=2, K=64, V=64, dtype=BF16, device=CUDA)
        run(case.draw(), backend="triton", **case.options())

    call(1, 1024)  # split
    call(70, 64)  # whole
    first = compiled()
    assert first
    for B, T in [
        (1, 1),
        (1, 2),
        (2, 1),
        (1, 16),
        (16, 1),
        (1, 63),
        (3, 64),
        (1, 65),
        (2, 500),
        (1, 513),
        (1, 4096),
        (33, 48),
    ]:
        call(B, T)
        assert compiled() == first, (B, T)
    for ends in [
        (0, 1),
        (0, 16),
        (0, 0, 5, 5, 64),
        (0, 512, 1024),
        (0, 1, 600),
        (0, 77, 77, 3000),
        tuple(range(200)),
        (0, 16, 32, 48),
    ]:
        call(1, ends[-1], ends)
        assert compiled() == first, ends


FIRST_CALL = """
import sys, time, torch
from tests.kernels.delta_cases import Case, run
from zoo_kernels.delta import triton_backend
drawn = Case(sys.argv[1], B=2, T=1024, H=4, K=128, V=128, dtype=torch.bfloat16, device=torch.device("cuda")).draw()
torch.ones(8, 8, device="cuda", dtype=torch.bfloat16).matmul(torch.ones(8, 8, device="cuda", dtype=torch.bfloat16))
torch.cuda.synchronize()
start = time.perf_counter()
run(drawn, backend="triton")
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


@pytest.mark.skipif(
    int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1, reason="compilers are timed alone: run it without -n"
)
@pytest.mark.parametrize("member", ["GDN", "KDA"])
def test_the_first_call_of_a_shape_class_takes_less_than_twenty_seconds(member, tmp_path):
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    ran = subprocess.run(
        [sys.executable, "-c", FIRST_CALL, member], capture_output=True, text=True, env=environment, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    assert any(tmp_path.iterdir()), "nothing was compiled"
    assert float(ran.stdout.split()[-1]) < 20.0, ran.stdout


# --------------------------------------------------------------------------------------------------------------- limits
def test_offsets_beyond_32_bits_reach_their_memory():
    # The states that enter chunks are 2^31 numbers and more. The past fades: the end sees 3000 tokens at most.
    case = Case(
        "GDN", T=2**19 + 67, H=4, group=4, K=128, V=128, decay=(-0.2, -0.1), dtype=BF16, state=False, device=CUDA
    )
    drawn = case.draw()
    drawn["dy"][:, :-200] = 0.0
    near = 3000
    tail = {name: x if x is None or name == "dlast" else x[:, -near:] for name, x in drawn.items()}
    expected = truth(replace(case, T=near), tail)
    got = run(drawn, backend="triton")
    for name, x in expected.items():
        ours, theirs = (got[name], x) if name == "last_state" else (got[name][:, -200:], x[:, -200:])
        assert relative_error(ours, theirs) <= limit(name, BF16), name
        assert got[name].isfinite().all(), name


def test_more_documents_than_a_grid_has_rows_are_served():
    N = 70_000
    case = Case("GDN", T=N, packing=tuple(range(N + 1)), group=2, dtype=FP32, state=False, device=CUDA)
    drawn = case.draw()
    got = run(drawn, backend="triton", packing=Packing.from_offsets(case.packing).to(CUDA))
    q, k, v, beta = (drawn[name].double() for name in ("q", "k", "v", "beta"))
    y = case.K**-0.5 * (q * k).sum(-1, keepdim=True) * beta.unsqueeze(-1) * v
    assert relative_error(got["y"], y) <= limit("y", FP32)
    last = k[0].repeat_interleave(2, 1).unsqueeze(-1) * (beta.unsqueeze(-1) * v)[0].unsqueeze(-2)
    assert relative_error(got["last_state"], last) <= limit("last_state", FP32)


# ------------------------------------------------------------------------------------------------------ host and device
@pytest.mark.parametrize("member", ["GDN", "KDA"])
def test_a_new_packing_does_not_make_the_host_wait(member):
    case = Case(member, T=300, packing=(0, 5, 5, 138, 300), group=2, K=64, V=64, dtype=BF16, device=CUDA)
    drawn = case.draw()
    run(drawn, backend="triton", **case.options())  # first calls load libraries
    packing = Packing.from_offsets((0, 7, 7, 139, 300)).to("cuda", non_blocking=True)
    with no_waits():
        run(drawn, backend="triton", packing=packing)


@pytest.mark.parametrize("member", ["GDN", "KDA"])
def test_a_cuda_graph_replays_forward_and_backward(member):
    case = Case(member, T=300, group=2, K=64, V=64, dtype=BF16, device=CUDA)
    drawn = case.draw()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(drawn, backend="triton")
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(drawn, backend="triton")
    fresh = replace(case, seed=1).draw()
    for name, x in drawn.items():
        x.copy_(fresh[name])
    graph.replay()
    assert_equal(captured, run(drawn, backend="triton"))


@pytest.mark.parametrize("member", ["GDN", "KDA"])
def test_a_side_stream_gives_the_same_numbers(member):
    case = Case(member, T=300, group=2, K=64, V=64, dtype=BF16, device=CUDA)
    drawn = case.draw()
    expected = run(drawn, backend="triton")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        got = run(drawn, backend="triton")
    side.synchronize()
    assert_equal(got, expected)


@pytest.mark.parametrize("member", ["GDN", "KDA"])
def test_a_training_step_in_bf16_under_autocast_and_checkpointing_compiles_whole(member):
    torch._dynamo.reset()
    case = Case(member, T=300, group=2, K=64, V=64, dtype=BF16, device=CUDA)
    drawn = case.draw()
    names = [name for name in INPUTS if drawn[name] is not None]

    def block(*tensors):
        y, last = delta_rule(**dict(zip(names, tensors)), backend="triton")
        return y * 2.0, last

    def step(*tensors):
        with torch.autocast("cuda", dtype=BF16):
            return torch.utils.checkpoint.checkpoint(block, *tensors, use_reentrant=False)

    found = []
    for function in (step, torch.compile(step, fullgraph=True)):
        inputs = [drawn[name].detach().requires_grad_() for name in names]
        outputs = function(*inputs)
        found.append([*outputs, *torch.autograd.grad(outputs, inputs, (drawn["dy"], drawn["dlast"]))])
    for got, expected in zip(*found):
        assert relative_error(got, expected) <= limit("y", BF16)
