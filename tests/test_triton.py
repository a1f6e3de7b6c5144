"""The GPU's kernels where there is none: run by Triton's interpreter, and compiled for GPUs of several kinds.

Triton reads at import whether it interprets, so this file runs itself as a script.
"""

import os
import subprocess
import sys
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import holdfast
from holdfast import Diagonal, Logarithmic
from holdfast.kernels import compiled as compiled_here
from holdfast.kernels.codes import Codes

SHARED = {80: 166_912, 86: 101_376, 90: 232_448, 120: 101_376}  # bytes that a program may have, by kind of GPU
SIZES = (4096, 5000, 129, 300, 8192, 12_304)  # full tiles, parts of one, and both
F32, BF16 = torch.float32, torch.bfloat16
STORED = {
    "float32": (F32, F32, F32), "bfloat16": (F32, BF16, BF16), "8 bits": (F32, F32, None),
    "weights too in bfloat16, 8 bits": (BF16, BF16, None),
}  # fmt: skip


def roles(stored: str, offset: int, lead: int) -> list[list]:
    """Gradients, parameters, means and entries: `offset` entries after a multiple of 16 bytes, `lead` into a block."""
    weight, mean, entry = STORED[stored]

    def shifted(values: torch.Tensor) -> torch.Tensor:
        room = values.new_empty(offset + len(values))
        room[offset:] = values
        return room[offset:]

    def drawn(dtype: torch.dtype) -> list[torch.Tensor]:
        return [shifted(torch.randn(size).to(dtype))[lead:] for size in SIZES]

    values = [torch.rand(size) * 10 ** torch.randn(size) * (torch.arange(size) % 7 > 0) for size in SIZES]
    entries: list = []
    for value in values:
        if entry is None:
            coded = Logarithmic.of(Diagonal({"w": value})).coded("w")
            entries.append(Codes(shifted(coded.codes), coded.tops, 0.5, 0).part(lead, len(value)))
        else:
            entries.append(shifted(value.to(entry))[lead:])
    return [drawn(weight), drawn(weight), drawn(mean), entries]


def dense(entries: list) -> list[torch.Tensor]:
    return [each.unpacked() if isinstance(each, Codes) else each.float() for each in entries]


def close(found: list[torch.Tensor], exact: list[torch.Tensor]) -> None:
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=1e-5 if one.dtype == F32 else 0.02, atol=1e-5)


def pull(stored: str, offset: int, lead: int) -> None:
    from holdfast.kernels.triton_pull import pull

    for scale in (0.3, torch.tensor(0.3)):
        grads, params, means, entries = roles(stored, offset, lead)
        known = dense(entries)
        rows = list(zip(grads, known, params, means, strict=True))
        exact = [g.float() + 0.3 * e * (p.float() - m.float()) for g, e, p, m in rows]
        value = sum(float((0.5 * e.double() * (p.double() - m.double()) ** 2).sum()) for _, e, p, m in rows)
        assert abs(float(pull(grads, params, means, entries, scale)) / value - 1) < 1e-5
        close(grads, exact)


def shrink(stored: str, offset: int, lead: int) -> None:
    from holdfast.kernels.triton_shrink import shrink

    _, params, means, entries = roles(stored, offset, lead)
    rows = zip(params, means, dense(entries), strict=True)
    exact = [p.float() - (p.float() - m.float()) * (0.3 * e / (1 + 0.3 * e)) for p, m, e in rows]
    shrink(params, means, entries, 0.3)
    close(params, exact)


def products() -> None:
    from holdfast.kernels import triton_products
    from holdfast.kernels.products import plain_squared_products

    triton_products._PROGRAMS = 2  # few, so that each has several examples
    for dtype in (F32, torch.float16):  # the interpreter has no products in bfloat16
        for batch, groups, positions, rows, columns in ((5, 1, 33, 20, 180), (3, 2, 16, 130, 40)):
            left = torch.randn(batch, groups, rows, positions).to(dtype).mT
            right = torch.randn(batch, groups, positions, columns).to(dtype)
            found, exact = torch.ones(groups, rows, columns), torch.ones(groups, rows, columns)
            triton_products.squared_products(found, left, right)
            plain_squared_products(exact, left, right)
            torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)


def blocks() -> None:
    from holdfast.kernels.blocks import plain_block_sums
    from holdfast.kernels.triton_blocks import exponential_sums

    logits = torch.randn(3, 300)
    logits[0, :128] = -float("inf")
    found, _ = exponential_sums(logits, 128)
    exact, _ = plain_block_sums(logits, 128)
    torch.testing.assert_close(found / found.sum(1, keepdim=True), exact)


def natural() -> None:
    from holdfast.kernels import triton_natural
    from holdfast.kernels.natural import Natural, plain_bend_, plain_natural_step_

    def drawn(count: int) -> list[list[torch.Tensor]]:
        torch.manual_seed(0)
        return [[torch.rand(size) + 0.1 for size in SIZES] for _ in range(count)]

    numbers = Natural(1e-2, 0.9, 0.99, 0.5, 0.7)
    fast, slow = drawn(7), drawn(7)
    triton_natural.step(fast, numbers.lr, numbers.momentum, numbers.memory, numbers.correction, numbers.radius)
    plain_natural_step_(slow, numbers)
    for found, exact in zip(fast, slow, strict=True):
        close(found, exact)
    fast, slow = drawn(6), drawn(6)
    triton_natural.bend(*fast, 50.0)
    plain_bend_(*slow, 50.0)
    for found, exact in zip(fast, slow, strict=True):
        close(found, exact)
    moved = []
    for sign in (1.0, -1.0):
        params, means, curvatures, priors = drawn(4)
        start = [each.clone() for each in params]
        triton_natural.shake(params, means, curvatures, priors, 50.0, 3, sign)
        close(means, start)
        rows = zip(params, start, curvatures, priors, strict=True)
        moved.append(torch.cat([(p - s) * (50 * (h + q)).sqrt() for p, s, h, q in rows]))
    torch.testing.assert_close(moved[0], -moved[1], rtol=1e-4, atol=1e-4)
    assert abs(float(moved[0].mean())) < 0.03
    assert abs(float(moved[0].std()) - 1) < 0.03


def trial() -> None:
    from holdfast.kernels.triton_trial import run

    run(torch.device("cpu"))


def compiled() -> None:
    """Squared products have room on every GPU; pulls and steps of full, aligned tiles read 16 bytes at a time."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from holdfast.kernels import triton_products, triton_pull, triton_shrink

    def build(kernel, kinds: dict[str, str], fixed: dict[str, object], kind: int, **options: int):
        names = kernel.arg_names
        types = {name: "constexpr" if name in fixed else kinds.get(name, "i32") for name in names}
        values = {(names.index(name),): value for name, value in fixed.items()}
        even = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if name not in fixed}
        source = ASTSource(kernel, types, values, even)
        return triton.compile(source, target=GPUTarget("cuda", kind, 32), options=options)

    for kind, room in SHARED.items():
        for size, precision, large in ((4, "ieee", False), (4, "tf32", False), (2, "tf32", False), (2, "tf32", True)):
            sides = (4096, 16384) if large else (64, 64)
            height, width, step, stages, warps = triton_products.tiling(*sides, size, precision, room)
            entry = "*fp32" if size == 4 else "*bf16"
            kinds = {"left": entry, "right": entry, "total": "*fp32", "parts": "*fp32"}
            fixed = {"left_position": 1, "right_position": 1, "PRECISION": precision}
            fixed |= {"ROWS": height, "COLUMNS": width, "STEP": step}
            found = build(triton_products._kernel, kinds, fixed, kind, num_warps=warps, num_stages=stages)
            assert found.metadata.shared <= room, (kind, size, precision, large, found.metadata.shared)

    tables = {"pointers": "*i64", "sizes": "*i64", "owners": "*i64", "starts": "*i64", "octave": "*fp64"}
    floats = {"partial": "*fp32", "factor": "*fp32", "scale": "fp32"}
    for coded in (False, True):
        dtypes = {"PARAM": tl.float32, "MEAN": tl.bfloat16, "ENTRY": None if coded else tl.bfloat16, "CODED": coded}
        for module, more in ((triton_pull, {"GRAD": tl.float32, "SCALED": False}), (triton_shrink, {})):
            found = build(module._kernel, tables | floats, dtypes | more, 90, num_warps=8)
            # Of 16 entries a thread, by role: 4 times 16 bytes in float32, 2 in bfloat16, 1 in codes.
            read = 4 + 2 + (1 if coded else 2) + (4 if "GRAD" in more else 0)
            assert found.asm["ptx"].count("ld.global.v4") >= read, (module.__name__, coded)
            assert found.asm["ptx"].count("st.global.v4") >= 4, (module.__name__, coded)


def _version() -> tuple[int, ...]:
    """Triton's: before 3.8 kernels are compiled by other calls, and the interpreter wants older versions of numpy."""
    try:
        return tuple(map(int, version("triton").split(".")[:2]))
    except PackageNotFoundError:
        return (0,)


has_triton = pytest.mark.skipif(_version() < (3, 8), reason="needs triton 3.8, which is for Linux")


def script(tmp_path: Path, *arguments: str, interpreted: bool) -> None:
    told = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "1" if interpreted else "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, env=os.environ | told, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


@has_triton
@pytest.mark.parametrize("name", ["pull", "shrink"])
def test_pulls_and_steps_are_right_wherever_their_tensors_start(name, tmp_path):
    script(tmp_path, name, *STORED, interpreted=True)


@has_triton
@pytest.mark.parametrize("name", ["products", "blocks", "natural", "trial"])
def test_kernels_are_their_plain_twins(name, tmp_path):
    script(tmp_path, name, interpreted=True)


@has_triton
def test_kernels_compile_for_gpus_of_several_kinds(tmp_path):
    script(tmp_path, "compiled", interpreted=False)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU to all appearances, with Triton; what is tried on it is `tried`."""
    tried = []
    monkeypatch.setattr(compiled_here, "_FOUND", {})
    monkeypatch.setattr(compiled_here.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0) if device.index < 2 else (7, 5))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setitem(sys.modules, "holdfast.kernels.triton_trial", SimpleNamespace(run=tried.append))
    return tried


def fails(monkeypatch, error):
    def run(device):
        raise error

    monkeypatch.setitem(sys.modules, "holdfast.kernels.triton_trial", SimpleNamespace(run=run))


GPUS = [torch.device("cuda", index) for index in range(3)]


def test_kernels_are_tried_once_on_each_gpu_and_not_on_old_ones(gpu):
    for _ in range(2):
        assert [compiled_here.has_triton(each) for each in GPUS] == [True, True, False]
    assert gpu == GPUS[:2]


def test_where_no_kernel_can_be_compiled_plain_operations_do_the_work_and_it_is_said_once(gpu, monkeypatch):
    fails(monkeypatch, RuntimeError("Failed to find C compiler.\nPlease specify one."))
    with pytest.warns(holdfast.HoldfastWarning, match=r"Failed to find C compiler\.\). Holdfast goes on"):
        assert not compiled_here.has_triton(GPUS[0])
    assert not compiled_here.has_triton(GPUS[0])  # a second warning would be an error
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not compiled_here.has_triton(GPUS[0])


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("CUDA error: an assert")]
)
def test_a_gpu_that_fails_says_so_itself_and_is_tried_again(gpu, error, monkeypatch):
    with monkeypatch.context() as meanwhile:
        fails(meanwhile, error)
        with pytest.raises(type(error)):
            compiled_here.has_triton(GPUS[0])
    assert compiled_here.has_triton(GPUS[0])


def test_no_first_kernel_is_started_while_a_step_is_recorded(gpu, monkeypatch):
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert not compiled_here.has_triton(GPUS[0])
        assert not gpu
    assert compiled_here.has_triton(GPUS[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert compiled_here.has_triton(GPUS[0])


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.cuda.device = lambda device: nullcontext()
    torch.cuda.current_device = lambda: None
    torch.cuda.get_device_properties = lambda device: None
    check, *stored = sys.argv[1:]
    lies = ((0, 0), (1, 0), (8, 100), (12, 100), (0, 112), (0, 128))
    for arguments in [(each, *where) for each in stored for where in lies] or [()]:
        globals()[check](*arguments)
