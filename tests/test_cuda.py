"""The same numbers on a GPU. Skipped where there is none."""

import pytest
import torch
from torch import nn

import holdfast
from cases import CASES
from curvature.test_kronecker import CASES as FACTORED
from curvature.test_kronecker import parts
from curvature.test_taps import LAYERS, case
from holdfast.bench.catalog import METHODS
from holdfast.bench.protocols import PROTOCOLS
from holdfast.bench.runner import run
from holdfast.bench.training import Trainer
from holdfast.hold import prefetch
from holdfast.identity import fingerprint
from holdfast.kernels import block_sums, sums_in_one_pass
from holdfast.kernels.blocks import plain_block_sums
from holdfast.kernels.natural import (
    Natural,
    bend_,
    natural_step_,
    plain_bend_,
    plain_natural_step_,
    plain_shake_,
    shake_,
)
from holdfast.likelihood.base import draw_class
from oracles import flat, relative_errors, squares_loop

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

RUNS = [(case, targets) for case in CASES for targets in case.targets]


@pytest.mark.parametrize(("case", "targets"), RUNS, ids=lambda v: str(v))
def test_the_fisher_is_that_of_the_cpu_and_batches_may_stay_there(case, targets):
    """cuDNN's recurrent kernels, which cannot differentiate in evaluation mode, included."""
    here, there = (
        holdfast.diagonal_fisher(
            case.model().to(device), case.batches((5, 2)), case.likelihood, targets=targets, forward=case.forward
        )
        for device in ("cpu", "cuda")
    )
    torch.testing.assert_close(flat(there.entries).cpu(), flat(here.entries), rtol=1e-7, atol=1e-10)
    assert there.sources[0].id == here.sources[0].id


@pytest.mark.parametrize("name", FACTORED)
def test_kronecker_factors_are_those_of_the_cpu(name):
    """What a kernel saw is unfolded in another way there, and summed over examples in one product."""
    case = FACTORED[name]
    here, there = (
        holdfast.kronecker_fisher(case.model().to(device), case.batches((5, 2)), case.likelihood, targets="expected")
        for device in ("cpu", "cuda")
    )
    for mine, its in zip(parts(here), parts(there), strict=True):
        assert mine.keys() == its.keys()
    for weight, (layer, term) in parts(here)[0].items():
        same, other = parts(there)[0][weight]
        assert same == layer
        for side in ("outputs", "inputs"):
            torch.testing.assert_close(getattr(other, side).cpu(), getattr(term, side), rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(flat(there.diagonal()).cpu(), flat(here.diagonal()), rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("case", [case for case in CASES if case.forward is None and case.name != "lstm"], ids=str)
def test_the_hessian_is_that_of_the_cpu(case):
    here, there = (
        holdfast.diagonal_hessian(case.model().to(device), case.batches(), case.likelihood)
        for device in ("cpu", "cuda")
    )
    torch.testing.assert_close(flat(there.entries).cpu(), flat(here.entries), rtol=1e-7, atol=1e-9)


def test_an_estimate_of_the_hessian_has_the_signs_of_the_cpu():
    case = next(case for case in CASES if case.forward is None and case.name != "lstm")
    here, there = (
        holdfast.hutchinson_hessian(case.model().to(device), case.batches((5, 2)), case.likelihood, probes=3, seed=1)
        for device in ("cpu", "cuda")
    )
    torch.testing.assert_close(flat(there.entries).cpu(), flat(here.entries), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_memory_from_the_cpu_holds_a_model_on_the_gpu_under_mixed_precision(fused, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5))
    data = [(torch.randn(64, 20), torch.randint(0, 5, (64,)))]
    posterior = holdfast.consolidate(
        holdfast.prior(model), model, holdfast.diagonal_fisher(model, data, holdfast.categorical)
    )
    x, y = torch.randn(64, 20, device="cuda"), torch.randint(0, 5, (64,), device="cuda")
    ends = []
    for scaled in (True, False):
        twin = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5)).cuda()
        holdfast.restore_(twin, posterior)
        optimizer = torch.optim.Adam(twin.parameters(), lr=0.01, fused=fused)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**12, enabled=scaled)
        with holdfast.hold(optimizer, twin, posterior, num_data=64, strength=20.0) as handle:
            for _ in range(30):
                optimizer.zero_grad()
                with torch.autocast("cuda", dtype=dtype):
                    loss = nn.functional.cross_entropy(twin(x), y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            assert handle.penalty > 0
        ends.append(flat({name: p.detach() for name, p in twin.named_parameters()}))
    torch.testing.assert_close(ends[0], ends[1], rtol=0.05, atol=5e-3)


def test_files_identities_and_random_state(tmp_path):
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).cuda()
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    state = torch.cuda.get_rng_state()
    fisher = holdfast.diagonal_fisher(model, [(x, y)], holdfast.categorical, targets="sampled")
    assert torch.equal(torch.cuda.get_rng_state(), state)
    posterior = holdfast.consolidate(holdfast.prior(model), model, fisher)
    holdfast.save(posterior, tmp_path / "memory.safetensors")
    loaded = holdfast.load(tmp_path / "memory.safetensors", device="cuda").posterior
    assert loaded.id == posterior.id == loaded.to("cpu").id
    assert fingerprint(loaded.mean) == fingerprint(loaded.to("cpu").mean)
    assert loaded.mean["0.weight"].is_cuda


def test_the_second_session_on_a_gpu(tmp_path):
    """A memory from its file is on the CPU; the model and its Fisher are not."""
    model = nn.Linear(4, 3).cuda()
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    first = holdfast.diagonal_fisher(model, [(x, y)], holdfast.categorical)
    holdfast.save(holdfast.consolidate(holdfast.prior(model), model, first), tmp_path / "memory.safetensors")
    memory = holdfast.load(tmp_path / "memory.safetensors")
    second = holdfast.diagonal_fisher(model, [(x + 1, y)], holdfast.categorical)
    after = holdfast.consolidate(memory, model, second)
    torch.testing.assert_close(after.precision.diagonal()["bias"], first.entries["bias"] + second.entries["bias"])
    assert after.num_data == 16


@pytest.mark.parametrize("seed", range(4))
def test_tensor_cores_are_not_taken_for_examples_that_see_each_other(seed):
    """A network that has memorized its labels, in float32 with factors rounded to ten bits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
        model, x, y = model.cuda(), torch.randn(64, 512, device="cuda"), torch.randint(0, 10, (64,), device="cuda")
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for step in range(301):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if step in (30, 100, 300):
                assert holdfast.diagonal_fisher(model, [(x, y)], holdfast.categorical).num_data == 64
    finally:
        torch.set_float32_matmul_precision(before)


def test_models_spread_over_devices_are_held():
    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4).cuda(), nn.Linear(4, 3)

        def forward(self, x):
            return self.second(self.first(x.cuda()).cpu())

    model = Split()
    posterior = holdfast.prior(model, precision=2.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = sum(0.5 * 2.0 * p.numel() for p in model.parameters())
    with holdfast.hold(optimizer, model, posterior, num_data=4, proximal=False) as handle:
        assert handle.penalty == pytest.approx(expected, rel=1e-5)
        optimizer.step()
    torch.testing.assert_close(model.first.weight.cpu(), posterior.mean["first.weight"].cpu() + 1 - 0.1 * 2 / 4)


@pytest.mark.parametrize("targets", ["observed", "sampled"])
def test_peak_memory_is_the_plain_passes_and_the_result(targets):
    torch.manual_seed(0)
    layers = [nn.Linear(512, 512) for _ in range(12)]
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.GELU())), nn.Linear(512, 1000)).cuda()
    batches = [(torch.randn(32, 64, 512), torch.randint(0, 1000, (32, 64))) for _ in range(3)]
    likelihood = holdfast.tokens(shift=False)

    def peak(run):
        run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before

    def plain():
        for x, y in batches:
            model.zero_grad()
            likelihood.nll(model(x.cuda()), y.cuda()).sum().backward()
        model.zero_grad()

    result = 4 * sum(p.numel() for p in model.parameters())
    layer = 4 * 32 * 64 * 1000  # the largest output
    ours = peak(lambda: holdfast.diagonal_fisher(model, batches, likelihood, targets=targets))
    assert ours <= peak(plain) + result + 4 * layer
    assert ours < 32 * result / 2  # batch × parameters would not fit


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_equals_a_loop_over_examples_on_the_gpu(name):
    """cuDNN's batch norm and fused attention have nodes of their own."""
    model, batch = case(name, torch.float64)
    model, batch = model.cuda(), tuple(part.cuda() for part in batch)
    fisher = holdfast.diagonal_fisher(model, [batch], holdfast.categorical, targets="observed")
    with torch.backends.cudnn.flags(enabled=False):  # its recurrent kernels cannot differentiate in evaluation mode
        errors = relative_errors(fisher.entries, squares_loop(model, batch, holdfast.categorical.nll))
    assert max(errors.values()) <= 1e-9, errors


@pytest.mark.parametrize(
    "method",
    [
        "fine-tuning", "ewc", "low-rank-32", "kronecker", "kronecker-rotated", "owm",
        "lwf", "probes", "probes+kronecker", "true-inputs",
    ],
)  # fmt: skip
def test_recorded_steps_are_the_steps(method):
    """A CUDA graph of a step, its hold included, against the same steps made one by one; the last batch is short."""
    protocol = PROTOCOLS["digits"].changed(tasks=2, epochs=2)
    tasks = protocol.sequence(0, device="cuda")
    ends = []
    for recorded in (True, False):
        torch.manual_seed(0)
        model, made = protocol.model(tasks).cuda(), METHODS[method].make(1.0)
        trainer = Trainer(protocol.training, recorded=recorded)
        for task in tasks:
            made.learn(model, task, trainer)
            made.remember(model, task, trainer)
        ends.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_memory_from_the_cpu_holds_by_its_answers_on_the_gpu():
    """The value is that of the CPU on the same inputs; nothing is copied to the GPU at a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    x = torch.randn(40, 6)
    memory = holdfast.Memory.of(holdfast.prior(model), model, holdfast.kept_inputs(x[:1], num_data=40))
    here = holdfast.distill(model, memory, likelihood=holdfast.categorical)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1
    expected = here.value(model)
    start = holdfast.distill(model.cuda(), memory, likelihood=holdfast.categorical)
    torch.testing.assert_close(start.value(model).cpu(), expected, rtol=1e-4, atol=1e-4)
    ours = {id(parameter) for parameter in model.parameters()}
    start.add_gradient_(model, 1.0, ours)
    before = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("error")
        start.add_gradient_(model, 1.0, ours)
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("classes", [2048, 50257])
def test_drawing_from_a_large_vocabulary_reads_it_once_and_draws_the_same(classes, dtype):
    torch.manual_seed(0)
    logits = (3 * torch.randn(64, classes + 3, device="cuda")).to(dtype)[:, :classes]  # rows that are apart
    logits[0, :1500] = -torch.inf
    assert sums_in_one_pass(logits)
    (sums, likely), (plain, p) = block_sums(logits, 1024), plain_block_sums(logits, 1024)
    total = sums.sum(-1, keepdim=True)
    torch.testing.assert_close(sums / total, plain, rtol=1e-5, atol=1e-7)
    places = torch.randint(0, classes, (64, 100), device="cuda")
    torch.testing.assert_close(likely(places) / total, p(places), rtol=1e-5, atol=1e-9)
    heights = torch.rand(64, dtype=torch.float64, device="cuda")
    drawn = draw_class(logits, heights)
    apart = (drawn != draw_class(logits.double(), heights)).sum()  # in float64 by the plain way
    assert apart <= 1
    assert not logits.gather(1, drawn.unsqueeze(-1)).isinf().any()


NATURAL = Natural(lr=0.05, momentum=0.9, memory=0.99, correction=0.3, radius=0.4)


def natural_roles(count: int, seed: int = 0, device: str = "cuda") -> list[list[torch.Tensor]]:
    """Lists of tensors of odd sizes, all positive from the third on, as curvatures and priors are."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3,), (70, 65), (5000,), (1,), (33, 2, 3)]
    kinds = [torch.randn if role < 2 else lambda *a, **k: torch.rand(*a, **k) + 0.1 for role in range(count)]
    return [[kind(shape, generator=generator).to(device) for shape in shapes] for kind in kinds]


def test_natural_gradient_steps_in_one_launch_are_those_of_one_operation_after_another():
    fast, slow = natural_roles(7), natural_roles(7)
    natural_step_(fast, NATURAL)
    plain_natural_step_(slow, NATURAL)
    torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-6)
    fast, slow = natural_roles(6), natural_roles(6)
    bend_(*fast, 1000.0)
    plain_bend_(*slow, 1000.0)
    torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(fast[0], natural_roles(6)[1], rtol=0, atol=0)  # at the means, to the last bit


def test_noise_drawn_in_the_kernel_is_normal_its_mirror_image_and_another_at_another_seed():
    def drawn(seed: int, sign: float = 1.0) -> torch.Tensor:
        """ε from what a kernel made of it, checked against the plain form."""
        params, means, curvatures, priors = natural_roles(4)
        before = [each.clone() for each in params]
        shake_(params, means, curvatures, priors, 50.0, seed, sign)
        torch.testing.assert_close(means, before, rtol=0, atol=0)
        noise = [(p - m) * (50 * (h + s)).sqrt() for p, m, h, s in zip(params, means, curvatures, priors, strict=True)]
        again, kept = [each.clone() for each in before], [torch.zeros_like(each) for each in before]
        plain_shake_(again, kept, curvatures, priors, 50.0, [each.clone() for each in noise])
        torch.testing.assert_close(again, params, rtol=1e-5, atol=1e-5)
        return torch.cat([each.flatten() for each in noise]).double()

    one, other, mirror = drawn(1), drawn(2), drawn(1, -1.0)
    assert abs(float(one.mean())) < 0.04
    assert float(one.std()) == pytest.approx(1, abs=0.03)
    assert float((one**4).mean()) == pytest.approx(3, abs=0.4)
    torch.testing.assert_close(one, -mirror, rtol=1e-3, atol=1e-3)
    assert abs(float((one * other).mean())) < 0.05
    assert abs(float((one[1:] * one[:-1]).mean())) < 0.05


def test_the_variational_optimizer_and_the_mean_field_learn_on_a_gpu():
    torch.manual_seed(0)
    x = torch.randn(300, 6)
    y = (x @ torch.randn(6, 3)).argmax(1)
    accuracies = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3)).to(device)
        prior = holdfast.prior(model, 1.0, mean=0.0)
        optimizer = holdfast.IVON(model, prior, holdfast.categorical, num_data=300, lr=0.03, start=0.03)
        for _ in range(300):
            optimizer.zero_grad()
            with optimizer.sampled():
                nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
        posterior = optimizer.posterior()
        q = holdfast.mean_field(model, posterior, holdfast.categorical, num_data=300)
        descent = torch.optim.Adam(q.parameters(), lr=1e-3)
        for _ in range(3):
            descent.zero_grad()
            q((x, y)).backward()
            descent.step()
        assert q.posterior().precision.entries["0.weight"].device.type == device
        accuracies.append(float((model(x.to(device)).argmax(1).cpu() == y).float().mean()))
    assert min(accuracies) > 0.9


@pytest.mark.parametrize("method", ["ewc", "kronecker-rotated", "si", "mas", "ivon", "mean-field"])
def test_methods_of_the_bench_learn_on_a_gpu_as_on_the_cpu(method):
    """Steps recorded as a CUDA graph, by a fused Adam, are the steps of the CPU; and so is a path recorded in them."""
    protocol = PROTOCOLS["digits-task"].changed(tasks=2, epochs=2)
    found = []
    for device in ("cpu", "cuda"):
        tasks = protocol.sequence(0, device=device)
        torch.manual_seed(0)
        model = protocol.model(tasks).to(device)
        trainer, way = Trainer(protocol.training), METHODS[method].make(1.0)
        for task in tasks:
            way.learn(model, task, trainer)
            way.remember(model, task, trainer)
        found.append(torch.cat([each.flatten().cpu() for each in way.kept]))
    apart = float((found[0] - found[1]).norm() / found[0].norm())
    # Draws differ between devices; and among eigenvectors that are nearly alike any rounding chooses others.
    assert apart < {"ivon": 0.5, "mean-field": 0.5, "kronecker-rotated": 0.1}.get(method, 0.02)


HELD = {
    "the gradient": (lambda params: torch.optim.Adam(params, fused=True), holdfast.diagonal_fisher, {}),
    "a step of its own": (lambda params: torch.optim.SGD(params, lr=0.1), holdfast.diagonal_fisher, {}),
    "Kronecker": (lambda params: torch.optim.AdamW(params, weight_decay=0.0), holdfast.kronecker_fisher, {}),
    "Kronecker, a step of its own": (lambda params: torch.optim.SGD(params, lr=0.1), holdfast.kronecker_fisher, {}),
    "Kronecker, every 2nd": (lambda params: torch.optim.SGD(params, lr=0.1), holdfast.kronecker_fisher, {"every": 2}),
}


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("way", HELD)
def test_a_held_step_waits_for_nothing(way):
    make, fisher, options = HELD[way]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).cuda()
    x, y = torch.randn(30, 6).cuda(), torch.randint(0, 3, (30,)).cuda()
    posterior = holdfast.consolidate(holdfast.prior(model), model, fisher(model, [(x, y)], holdfast.categorical))
    optimizer = make(model.parameters())
    before = torch.cuda.get_sync_debug_mode()
    with holdfast.hold(optimizer, model, posterior, num_data=30, **options) as handle:
        for step in range(4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x.roll(1, 1)), y).backward()
            torch.cuda.set_sync_debug_mode("error" if step else before)
            try:
                optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode(before)
        assert handle.proximal == ("a step of its own" in way)
        assert handle.penalty > 0


STORED = {
    "float32": lambda known: known,
    "bfloat16": lambda known: known.to(dtype=torch.bfloat16),
    "8 bits": lambda known: known.compact(),
    "8 bits, mean in bfloat16": lambda known: known.compact().to(dtype=torch.bfloat16),
}


def held_by(posterior, device: str, options: dict, steps: int = 4) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 5)).to(device)
    x, y = torch.randn(30, 40).to(device), torch.arange(30, device=device) % 5
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = torch.cuda.get_sync_debug_mode()
    with holdfast.hold(optimizer, model, posterior, num_data=30, strength=5.0, **options) as handle:
        for step in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x.roll(step, 1)), y).backward()
            torch.cuda.set_sync_debug_mode("error" if step and device == "cuda" else before)
            try:
                optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode(before)
        told = torch.tensor([handle.penalty])
    return torch.cat([*(p.detach().flatten().cpu() for p in model.parameters()), told])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("proximal", [False, True])
@pytest.mark.parametrize("stored", STORED)
def test_small_memories_hold_on_a_gpu_and_from_the_cpu_as_on_the_cpu(stored, proximal, monkeypatch):
    """A step waits for nothing, wherever the memory is; in pieces so small that each buffer is filled many times."""
    monkeypatch.setattr(prefetch, "SIZE", 512)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 5))
    x, y = torch.randn(30, 40), torch.arange(30) % 5
    fisher = holdfast.diagonal_fisher(model, [(x, y)], holdfast.categorical)
    posterior = STORED[stored](holdfast.consolidate(holdfast.prior(model), model, fisher))
    here = held_by(posterior, "cpu", {"proximal": proximal})
    there = held_by(posterior, "cuda", {"proximal": proximal})
    brought = held_by(posterior, "cuda", {"proximal": proximal, "offload": True})
    torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(brought, there, rtol=1e-5, atol=1e-6)


def test_codes_are_the_same_on_a_gpu():
    entries = {"w": (4 * torch.randn(3000, generator=torch.Generator().manual_seed(0))).exp()}
    here, there = (holdfast.Logarithmic.of(holdfast.Diagonal(entries).to(device)) for device in ("cpu", "cuda"))
    assert torch.equal(here.codes["w"], there.codes["w"].cpu())
    assert torch.equal(here.tops["w"], there.tops["w"].cpu())
    torch.testing.assert_close(there.diagonal()["w"].cpu(), here.diagonal()["w"], rtol=3e-7, atol=0)


def test_a_memory_on_the_cpu_takes_no_room_on_the_gpu():
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8))).cuda()
    entries = {name: torch.rand(p.shape) for name, p in model.named_parameters()}
    posterior = holdfast.Posterior(holdfast.prior(model).mean, holdfast.Diagonal(entries)).to("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with holdfast.hold(optimizer, model, posterior, num_data=1, proximal=False, offload=True):
        optimizer.step()
    kept = 8 * sum(p.numel() for p in model.parameters())
    assert torch.cuda.max_memory_allocated() - before < 0.6 * kept


def test_memory_on_a_gpu_does_not_grow_with_the_tasks_that_were_trained():
    """One stream for all of them: libraries keep room for every stream that they see."""
    protocol = PROTOCOLS["digits"].changed(epochs=1)
    tasks = protocol.sequence(0, device="cuda")
    torch.manual_seed(0)
    made = run(METHODS["ewc"].make(1.0), tasks, lambda: protocol.model(tasks), protocol.training, device="cuda")
    assert made.learning_bytes[-1] < made.learning_bytes[1] + 2**20
