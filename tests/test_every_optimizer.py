"""A hold under every optimizer there is, in every form, is the same loop with the penalty in its loss."""

import contextlib
import inspect
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler, swa_utils

import holdfast
from cases import relu_mlp
from oracles import flat
from processes import gathered, main

N = 24  # the new data
STRENGTH = 30.0


class Run:
    """A model some way from what it knows, to be trained on: held, or with the penalty as a term, or free."""

    def __init__(self, way: str, make=relu_mlp, structure=holdfast.diagonal_fisher) -> None:
        self.way, self.strength = way, STRENGTH
        torch.manual_seed(0)
        self.model = make().double()
        old = (torch.randn(40, 5).double(), torch.randint(0, 3, (40,)))
        fisher = structure(self.model, [old], holdfast.categorical)
        self.posterior = holdfast.consolidate(holdfast.prior(self.model), self.model, fisher)
        self.x, self.y = torch.randn(N, 5).double() + 1, torch.randint(0, 3, (N,))
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)

    def held(self, *optimizers: Optimizer, model: nn.Module | None = None):
        if self.way != "held":
            return contextlib.nullcontext()
        return holdfast.hold(
            optimizers, model or self.model, self.posterior, num_data=N, strength=self.strength, proximal=False
        )

    def data(self, model: nn.Module | None = None, *, parts: int = 1, scaler=None) -> Tensor:
        """The gradient of the data, in so many parts."""
        whole = torch.zeros(())
        for x, y in zip(self.x.chunk(parts), self.y.chunk(parts), strict=True):
            loss = F.cross_entropy((model or self.model)(x), y) / parts
            (loss if scaler is None else scaler.scale(loss)).backward()
            whole = whole + loss.detach()
        return whole

    def term(self, scaler=None) -> Tensor:
        """And of the penalty, where it is a term of the loss."""
        if self.way != "term":
            return torch.zeros(())
        loss = self.strength * holdfast.penalty(self.model, self.posterior) / N
        (loss if scaler is None else scaler.scale(loss)).backward()
        return loss.detach()

    def weights(self) -> Tensor:
        return flat({name: p.detach() for name, p in self.model.named_parameters()})


def require_same(train, atol: float = 1e-12, **made) -> None:
    """Held, `train` ends where it ends with the term, and not where it ends free."""
    ends = {}
    for way in ("held", "term", "free"):
        run = Run(way, **made)
        ends[way] = train(run)
        ends[way] = run.weights() if ends[way] is None else ends[way]
    torch.testing.assert_close(ends["held"], ends["term"], rtol=0, atol=atol)
    assert float((ends["held"] - ends["free"]).abs().max()) > 1e-4


# The classes of torch. Their own arithmetic is the same in both loops, and what differs is the order in which two
# gradients are added: 1e-12 is far above it. LBFGS divides by differences of gradients, which makes more of it.
OPTIONS = {
    "ASGD": {"lr": 0.1},
    "Adadelta": {"lr": 1.0},
    "Adafactor": {"lr": 0.02},
    "Adagrad": {"lr": 0.05},
    "Adam": {"lr": 0.02},
    "AdamW": {"lr": 0.02, "weight_decay": 0.0},
    "Adamax": {"lr": 0.02},
    "LBFGS": {"lr": 0.1, "max_iter": 3},
    "Muon": {"lr": 0.01, "weight_decay": 0.0},
    "NAdam": {"lr": 0.02},
    "RAdam": {"lr": 0.05},
    "RMSprop": {"lr": 0.01, "momentum": 0.5},
    "Rprop": {"lr": 0.01},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
}
CLASSES = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
}
FORMS = [
    pytest.param(name, form, id=f"{name}-{form or 'plain'}")
    for name in OPTIONS
    if name in CLASSES
    for form in (None, "foreach", "fused")
    if form is None or form in inspect.signature(CLASSES[name]).parameters
]


def made(name: str, form: str | None, params) -> list[Optimizer]:
    params, options = list(params), OPTIONS[name] | ({} if form is None else {form: True})
    if name != "Muon":
        return [CLASSES[name](params, **options)]
    matrices = [parameter for parameter in params if parameter.ndim == 2]  # it takes no others
    rest = [parameter for parameter in params if parameter.ndim != 2]
    return [CLASSES[name](matrices, **options), torch.optim.SGD(rest, lr=0.1)]


def test_every_class_of_torch_is_here():
    """SparseAdam takes sparse gradients alone, and is refused."""
    assert {*CLASSES, "Muon"} == {*OPTIONS, "SparseAdam"}


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("name", "form"), [each for each in FORMS if each.values[0] != "LBFGS"])  # it needs a closure
def test_a_hold_is_a_term_of_the_loss(name, form, parts):
    def train(run: Run) -> None:
        optimizers = made(name, form, run.model.parameters())
        with run.held(*optimizers):
            for _ in range(5):
                run.model.zero_grad()
                run.data(parts=parts)
                run.term()
                for optimizer in optimizers:
                    optimizer.step()

    require_same(train)


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_so_it_is_where_a_closure_zeroes_the_gradients(name, form):
    def train(run: Run) -> None:
        first, *others = made(name, form, run.model.parameters())

        def closure() -> Tensor:
            run.model.zero_grad()
            return run.data() + run.term()

        with run.held(first, *others):
            for _ in range(5):
                seen = first.step(closure)
                for other in others:
                    other.step()
            losses.append(seen.item())

    losses: list[float] = []
    require_same(train, atol=1e-9 if name == "LBFGS" else 1e-12)
    assert losses[0] == pytest.approx(losses[1], abs=1e-9)  # what the closure returns is the whole objective
    assert losses[0] != pytest.approx(losses[2], abs=1e-3)


@pytest.mark.parametrize("structure", [holdfast.kronecker_fisher, holdfast.dense_fisher])
def test_a_pull_across_optimizers_is_taken_at_the_weights_of_each_step(structure):
    """Λ couples weights and biases: the biases' optimizer, which is second, feels where the weights have gone."""
    ends = []
    for way in ("held", "by hand"):
        run = Run(way, structure=structure)
        matrices, biases = ([p for p in run.model.parameters() if p.ndim == ndim] for ndim in (2, 1))
        optimizers = [torch.optim.Adam(matrices, lr=0.02), torch.optim.SGD(biases, lr=0.1)]
        with run.held(*optimizers):
            for _ in range(5):
                run.model.zero_grad()
                run.data()
                for optimizer, params in zip(optimizers, (matrices, biases), strict=True):
                    if way == "by hand":
                        pull = holdfast.penalty_gradient(run.model, run.posterior)
                        for name, parameter in run.model.named_parameters():
                            if any(parameter is each for each in params):
                                parameter.grad += STRENGTH / N * pull[name]
                    optimizer.step()
        ends.append(run.weights())
    torch.testing.assert_close(*ends, rtol=0, atol=1e-12)


def test_names_groups_and_a_rate_that_is_a_tensor():
    def train(run: Run) -> None:
        groups = [
            {"params": list(run.model[:2].named_parameters()), "lr": torch.tensor(0.05)},
            {"params": [(f"last.{name}", p) for name, p in run.model[2:].named_parameters()], "betas": (0.5, 0.9)},
        ]
        optimizer = torch.optim.Adam(groups, lr=torch.tensor(0.01))
        with run.held(optimizer):
            stepped(run, optimizer, 5)

    require_same(train)


def stepped(run: Run, optimizer: Optimizer, steps: int, model: nn.Module | None = None) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        run.data(model)
        run.term()
        optimizer.step()


def test_an_optimizer_for_each_parameter_that_steps_in_the_backward_pass():
    def train(run: Run) -> None:
        optimizers = {parameter: torch.optim.Adam([parameter], lr=0.02) for parameter in run.model.parameters()}

        def step(parameter: nn.Parameter) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in optimizers:
            parameter.register_post_accumulate_grad_hook(step)
        with run.held(*optimizers.values()):
            for _ in range(5):
                loss = F.cross_entropy(run.model(run.x), run.y)
                if run.way == "term":
                    loss = loss + STRENGTH * holdfast.penalty(run.model, run.posterior) / N
                loss.backward()

    require_same(train)


def test_a_state_that_is_loaded_leaves_the_hold_where_it_is():
    def train(run: Run) -> None:
        optimizer = torch.optim.Adam(run.model.parameters(), lr=0.02)
        with run.held(optimizer):
            stepped(run, optimizer, 2)
            optimizer.load_state_dict(optimizer.state_dict())
            stepped(run, optimizer, 3)

    require_same(train)


class TestScaling:
    """GradScaler: fused optimizers divide by its factor themselves and skip by themselves."""

    CASES = (
        ("SGD", None), ("SGD", "fused"), ("Adam", "foreach"), ("Adam", "fused"), ("AdamW", "fused"),
        ("Adagrad", "fused"),
    )  # fmt: skip

    @pytest.mark.parametrize("overflow", [False, True])
    @pytest.mark.parametrize(("name", "form"), CASES)
    def test_neither_the_factor_nor_skipped_steps_touch_the_pull(self, name, form, overflow):
        def train(run: Run) -> None:
            (optimizer,) = made(name, form, run.model.parameters())
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
            with run.held(optimizer):
                for step in range(8):
                    optimizer.zero_grad()
                    run.data(scaler=scaler)
                    run.term(scaler)
                    if overflow and step in (2, 4, 5):
                        run.model[2].bias.grad[1] = torch.inf
                    before = run.weights()
                    scaler.step(optimizer)
                    scaler.update()
                    assert torch.equal(run.weights(), before) == (overflow and step in (2, 4, 5))

        require_same(train)

    @pytest.mark.parametrize(("name", "form"), CASES)
    def test_clipping_in_between_leaves_it_whole(self, name, form):
        def train(run: Run) -> None:
            (optimizer,) = made(name, form, run.model.parameters())
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
            with run.held(optimizer):
                for step in range(6):
                    optimizer.zero_grad()
                    run.data(scaler=scaler)
                    if step % 2:
                        scaler.unscale_(optimizer)
                        nn.utils.clip_grad_norm_(run.model.parameters(), 0.01)
                    run.term(None if step % 2 else scaler)
                    scaler.step(optimizer)
                    scaler.update()

        require_same(train)


@pytest.mark.parametrize("clip", [
    lambda params: nn.utils.clip_grad_norm_(params, 0.01), lambda params: nn.utils.clip_grad_value_(params, 0.001),
], ids=["norm", "value"])  # fmt: skip
def test_the_gradient_of_the_data_alone_is_clipped(clip):
    def train(run: Run) -> None:
        optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
        with run.held(optimizer):
            for _ in range(5):
                optimizer.zero_grad()
                run.data(parts=2)
                clip(run.model.parameters())
                run.term()
                optimizer.step()

    require_same(train)


class TestSchedules:
    @pytest.mark.parametrize("schedule", [
        lambda optimizer: lr_scheduler.StepLR(optimizer, 1, 0.7),
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=8),
    ], ids=["steps", "one-cycle"])  # fmt: skip
    @pytest.mark.parametrize("first", ["schedule", "hold"])
    def test_a_schedule_may_wrap_the_step_before_or_after_the_hold(self, first, schedule):
        def train(run: Run) -> None:
            optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1, momentum=0.5)
            scheduler = schedule(optimizer) if first == "schedule" else None
            with run.held(optimizer) as handle:
                scheduler = scheduler or schedule(optimizer)
                for _ in range(5):
                    stepped(run, optimizer, 1)
                    scheduler.step()
            assert handle is None or handle.steps == 5

        require_same(train)

    def test_an_average_of_the_weights_is_of_held_ones(self):
        def train(run: Run) -> Tensor:
            optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
            average = swa_utils.AveragedModel(run.model)
            schedule = swa_utils.SWALR(optimizer, swa_lr=0.05)
            with run.held(optimizer):
                for _ in range(5):
                    stepped(run, optimizer, 1)
                    average.update_parameters(run.model)
                    schedule.step()
            return flat({name: p.detach() for name, p in average.module.named_parameters()})

        require_same(train)

    def test_the_average_itself_is_not_what_trains(self):
        run = Run("held")
        optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
        with pytest.raises(holdfast.InertError, match=r"none of the model's.*a copy of the model"):
            run.held(optimizer, model=swa_utils.AveragedModel(run.model))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
class TestCompiled:
    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_models(self, backend):
        def train(run: Run) -> None:
            model = torch.compile(run.model, backend=backend)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
            with run.held(optimizer, model=model):
                stepped(run, optimizer, 5, model)

        require_same(train)
        torch.compiler.reset()

    @pytest.mark.parametrize("name", ["SGD", "Adam"])
    def test_steps_are_compiled_without_the_hold_and_held_all_the_same(self, name):
        """The strength changes, and the step is not compiled anew for it."""
        graphs, counts = [], []

        def backend(graph, _):
            graphs.append(graph)
            return graph.forward

        def train(run: Run) -> None:
            (optimizer,) = made(name, None, run.model.parameters())
            optimizer.step = torch.compile(optimizer.step, backend=backend)
            before = len(graphs)
            run.data()
            optimizer.step()  # compiled before anything is held
            with run.held(optimizer) as handle:
                for step in range(6):
                    run.strength = STRENGTH / (1 + step)
                    if handle is not None:
                        handle.strength = run.strength
                    stepped(run, optimizer, 1)
            assert handle is None or handle.steps == 6
            counts.append(len(graphs) - before)
            torch.compiler.reset()

        require_same(train)
        assert 0 < counts[0] == counts[1] == counts[2]

    def test_what_comes_after_a_compiled_step_comes(self):
        """A step of its own (proximal), and a budget's look at what is spent."""
        ends, strengths = [], []
        for compiled in (True, False):
            run = Run("held")
            optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
            if compiled:
                optimizer.step = torch.compile(optimizer.step, backend="eager")
            with (
                pytest.warns(holdfast.HoldfastWarning, match="a local estimate"),
                holdfast.hold(optimizer, run.model, run.posterior, num_data=N, proximal=True, budget=1.0) as handle,
            ):
                stepped(run, optimizer, 10)
            ends.append(run.weights())
            strengths.append(handle.strength)
        torch.compiler.reset()
        torch.testing.assert_close(*ends, rtol=0, atol=1e-12)
        assert strengths[0] == pytest.approx(strengths[1]) != 1.0


def free(kind: str) -> type[Optimizer]:
    return getattr(pytest.importorskip("schedulefree"), kind)


class TestScheduleFree:
    """The data's gradient is taken at y, and so is the pull; x is what is used, and z what is stepped."""

    @pytest.mark.parametrize("foreach", [False, True])
    @pytest.mark.parametrize("kind", ["AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree"])
    @pytest.mark.parametrize("closure", [False, True])
    def test_the_pull_acts_on_what_is_trained(self, kind, foreach, closure):
        def train(run: Run) -> None:
            optimizer = free(kind)(run.model.parameters(), lr=0.05, foreach=foreach)

            def passes() -> Tensor:
                optimizer.zero_grad()
                return run.data() + run.term()

            with run.held(optimizer):
                for _ in range(3):  # from x to y and back, as around an evaluation
                    optimizer.train()
                    for _ in range(3):
                        if closure:
                            optimizer.step(passes)
                        else:
                            passes()
                            optimizer.step()
                    optimizer.eval()

        require_same(train)

    @pytest.mark.parametrize("kind", ["AdamWScheduleFreeClosure", "SGDScheduleFreeClosure"])
    def test_those_that_switch_by_themselves(self, kind):
        def train(run: Run) -> None:
            optimizer = free(kind)(run.model.parameters(), lr=0.05)

            def closure() -> Tensor:
                optimizer.zero_grad()
                return run.data() + run.term()

            with run.held(optimizer):
                for _ in range(6):
                    optimizer.step(closure)

        require_same(train)

    def test_the_numbers_are_of_the_weights_that_the_model_has(self):
        """In training mode those are y; of the model as it is used they are after eval()."""
        run = Run("held")
        optimizer = free("SGDScheduleFree")(run.model.parameters(), lr=0.5)
        optimizer.train()
        with run.held(optimizer) as handle:
            stepped(run, optimizer, 5)
            training, by_hand = handle.penalty, holdfast.penalty(run.model, run.posterior).item()
            optimizer.eval()
            used = handle.metrics()["holdfast/penalty"]
        assert training == pytest.approx(by_hand)
        assert used == pytest.approx(holdfast.penalty(run.model, run.posterior).item())
        assert used != pytest.approx(training, rel=1e-3)

    @pytest.mark.filterwarnings("ignore:.*a local estimate:holdfast.HoldfastWarning")
    @pytest.mark.filterwarnings("ignore:to stay within:holdfast.HoldfastWarning")
    def test_a_budget_is_finished_with_the_weights_that_are_used(self):
        """Finished at y, they would be 0.03 nats off after eval(), which goes on from z by way of y."""
        run = Run("held")
        holdfast.restore_(run.model, run.posterior)
        optimizer = free("AdamWScheduleFree")(run.model.parameters(), lr=5.0)
        optimizer.train()
        handle = holdfast.hold(optimizer, run.model, run.posterior, num_data=N, budget=0.003)
        stepped(run, optimizer, 10)
        with pytest.raises(holdfast.ArgumentError, match=r"AdamWScheduleFree trains other weights.*Call its eval\(\)"):
            handle.finish()
        optimizer.eval()
        handle.remove()
        assert handle.spent.kept < 1
        assert handle.metrics()["holdfast/rise"] <= 0.003

    def test_a_wrapper_of_another_optimizer_names_what_to_hold(self):
        run = Run("held")
        wrapper = free("ScheduleFreeWrapper")(torch.optim.SGD(run.model.parameters(), lr=0.1))
        with pytest.raises(holdfast.ArgumentError, match=r"got ScheduleFreeWrapper.*give hold its `\.base`"):
            run.held(wrapper)
        wrapper.train()
        with run.held(wrapper.base) as handle:
            stepped(run, wrapper, 3)
        assert handle.steps == 3


# Models that are cut in pieces or copied over several processes: run by this file as a script, on two of them.


class Normed(nn.Module):
    """A norm whose gradient is a sum over processes that is yet to be made, where the sequence is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.idle = (
            nn.LayerNorm(5), nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(2, 2),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x)))).mean(1)


def normed() -> nn.Module:
    torch.manual_seed(1)
    return Normed().double()


def sequences() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(8, 4, 5, generator=generator).double(), torch.arange(8) % 3


def known(model: nn.Module) -> holdfast.Posterior:
    """In pieces where the model is."""
    mean = holdfast.prior(model, mean=0.3).mean
    return holdfast.Posterior(mean, holdfast.Diagonal({name: 2 * torch.ones_like(each) for name, each in mean.items()}))


DISTRIBUTED = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.05, foreach=True),
    "fused": lambda params: torch.optim.Adam(params, lr=0.05, fused=True),
}


def trained(model: nn.Module, optimizer: Optimizer, rows: slice, trains: nn.Module | None = None) -> dict:
    """Held, in a process that has some of the data; where it ends, whole, and what the penalty is said to be."""
    x, y = (each[rows] for each in sequences())
    handle = holdfast.hold(optimizer, model, known(model), num_data=8, strength=3.0, proximal=False)
    for _ in range(4):
        optimizer.zero_grad()
        F.cross_entropy((trains or model)(x), y).backward()
        optimizer.step()
    found = {name: p.detach() for name, p in model.named_parameters()}
    whole = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in found.items()}
    penalty = handle.penalty
    handle.remove()
    return {"weights": whole, "penalty": penalty}


def fsdp(rank: int) -> dict:
    from torch.distributed.fsdp import fully_shard

    found = {}
    for name, make in DISTRIBUTED.items():
        model = normed()
        fully_shard(model.up)
        fully_shard(model)
        found[name] = trained(model, make(model.parameters()), slice(4 * rank, 4 * rank + 4))
    return found


def sequence_parallel(rank: int) -> dict:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for name in ("sgd", "adam"):
        model = normed()
        cut = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True)
        parallelize_module(model, mesh, cut)
        parallelize_module(model, mesh, {
            "norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(),
        })  # fmt: skip
        for key, parameter in model.idle.named_parameters():
            setattr(model.idle, key, nn.Parameter(distribute_tensor(parameter.data, mesh, [Replicate()])))
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        found[name] = trained(model, DISTRIBUTED[name](model.parameters()), slice(8))
        placements = model.norm.weight.grad.placements
        assert placements[0].is_partial(), placements
    return found


def replicas(rank: int) -> dict:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    found = {}
    for name in ("sgd", "zero"):
        model = normed()
        replica = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)  # `idle` takes no part
        make = DISTRIBUTED["sgd"]
        optimizer = make(model.parameters()) if name == "sgd" else ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9
        )  # fmt: skip
        found[name] = trained(replica, optimizer, slice(4 * rank, 4 * rank + 4))
        found[name]["weights"] = {key.removeprefix("module."): p for key, p in found[name]["weights"].items()}
    return found


SCENARIOS = {2: [fsdp, sequence_parallel, replicas]}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    return gathered(tmp_path_factory, __file__, SCENARIOS)


def with_a_term(name: str) -> tuple[nn.Module, holdfast.Posterior]:
    """In one process, with all of the data and the penalty in the loss."""
    model = normed()
    posterior, (x, y) = known(model), sequences()
    optimizer = DISTRIBUTED[name](model.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) + 3.0 * holdfast.penalty(model, posterior) / 8).backward()
        optimizer.step()
    return model, posterior


several = pytest.mark.parametrize(("how", "name", "alone"), [
    ("fsdp", "sgd", "sgd"), ("fsdp", "adam", "adam"), ("fsdp", "fused", "fused"),
    ("sequence_parallel", "sgd", "sgd"), ("sequence_parallel", "adam", "adam"),
    ("replicas", "sgd", "sgd"), ("replicas", "zero", "sgd"),
])  # fmt: skip


@several
def test_several_processes_are_held_as_one_is(found, how, name, alone):
    model, _ = with_a_term(alone)
    for rank in found[how]:
        there = {key: parameter.detach() for key, parameter in model.named_parameters()}
        torch.testing.assert_close(rank[name]["weights"], there, rtol=0, atol=1e-12)


@several
def test_every_process_tells_the_whole_penalty(found, how, name, alone):
    """A budget's strength follows it: processes that told their own part would go different ways."""
    whole = holdfast.penalty(*with_a_term(alone)).item()
    assert [rank[name]["penalty"] for rank in found[how]] == pytest.approx([whole, whole])


if __name__ == "__main__":
    main(Path(sys.argv[1]), SCENARIOS)
