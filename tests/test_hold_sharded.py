"""A hold on several processes: the weights and the numbers of one process, whatever way the model is cut."""

import itertools
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.devices import full
from holdfast.pieces import resharded
from holdfast.posterior.placed import placed
from processes import gathered, main
from sharded_cases import FISHERS, OPTIMIZERS, examples, kept, kind_of, made, memory, trained, weights, wrapped

# How the model is cut, the structure of the memory, the optimizer, options of the hold, parts of a batch.
CUT = ("replicas", "shards", "tensor parallel")
PLAIN: tuple = ()
ROWS = {
    2: [
        *itertools.product(CUT, ("diagonal", "kronecker", "low rank"), ("sgd",), (PLAIN,), (1,)),
        *itertools.product(CUT[1:], ("diagonal",), ("sgd", "adam"), ((("proximal", False),),), (1,)),
        *itertools.product(CUT[1:], ("diagonal",), ("adam",), ((("proximal", True),),), (1,)),
        *itertools.product(CUT[1:], ("kronecker",), ("adam",), ((("every", 3),), (("rotate", True),)), (1,)),
        *itertools.product(("replicas", "shards", "shards, offloaded"), ("diagonal",), ("sgd",), (PLAIN,), (2,)),
    ],
    4: [
        *itertools.product(CUT, ("diagonal", "kronecker"), ("sgd",), (PLAIN,), (1,)),
        ("shards of replicas", "kronecker", "adam", PLAIN, 1),
        ("shards, tensor parallel", "kronecker", "adam", PLAIN, 1),
        ("shards", "diagonal", "adam", PLAIN, 4),
    ],
}
TERMS = list(itertools.product(CUT, ("probes", "kept", "new"), ("memory", "copy")))
BUDGETS = list(itertools.product(CUT, ("quadratic", "probes")))


def place(rank: int, world: int, width: int) -> tuple[int, int]:
    """Which share of the data is seen, and of how many."""
    return rank // width, world // width


def held(row, rank=0, world=1):
    how, structure, optimizer, options, parts = row
    model, width = wrapped(how if world > 1 else "alone", world) if world > 1 else (made(kind_of(how)), 1)
    stepper = OPTIMIZERS[optimizer](model.parameters())
    with holdfast.hold(
        stepper, model, memory(kind_of(how), structure), num_data=40, strength=3.0, **dict(options)
    ) as handle:
        trained(model, stepper, how, *place(rank, world, width), accumulate=parts)
        told = {key: value for key, value in handle.metrics().items() if key != "holdfast/steps"}
    return weights(model), told


def distilled(row, rank=0, world=1):
    how, source, teacher = row
    kind = kind_of(how)
    model, width = wrapped(how, world) if world > 1 else (made(kind), 1)
    x, y = examples(kind, 24, seed=9)
    inputs = {
        "probes": lambda: holdfast.gaussian_probes([(x, y)]),
        "kept": lambda: holdfast.kept_inputs(x),
        "new": lambda: holdfast.new_inputs(model, num_data=24),
    }[source]()
    asked = memory(kind) if teacher == "memory" else made(kind)
    term = holdfast.distill(model, asked, inputs, holdfast.categorical, batch=8)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with holdfast.hold(optimizer, model, term, num_data=40, strength=3.0) as handle:
        trained(model, optimizer, how, *place(rank, world, width))
        value = handle.penalty
    return weights(model), {"penalty": value}


def budgeted(row, rank=0, world=1):
    how, by = row
    kind = kind_of(how)
    model, width = wrapped(how, world) if world > 1 else (made(kind), 1)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    known = kept(kind) if by == "probes" else memory(kind)
    handle = holdfast.hold(optimizer, model, known, num_data=40, budget=0.002)
    trained(model, optimizer, how, *place(rank, world, width), steps=12)
    spent = handle.finish()
    handle.remove()
    return weights(model), {"strength": spent.strength, "rise": spent.rise, "kept": spent.kept}


def rows_of_two(rank: int) -> dict:
    return {row: held(row, rank, 2) for row in ROWS[2]}


def rows_of_four(rank: int) -> dict:
    return {row: held(row, rank, 4) for row in ROWS[4]}


def terms(rank: int) -> dict:
    return {row: distilled(row, rank, 2) for row in TERMS}


def budgets(rank: int) -> dict:
    return {row: budgeted(row, rank, 2) for row in BUDGETS}


def surface(rank: int) -> dict:
    """What else a user asks of a sharded model."""
    model, _ = wrapped("shards", 2)
    known = memory(kind_of("shards"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1
    loss = holdfast.penalty(model, known)
    loss.backward()
    forecast = holdfast.forecast(model, known)
    spread = holdfast.prior(model, precision=2.0)
    return {
        "penalty": float(loss.detach()),
        "gradient": {name: full(parameter.grad) for name, parameter in model.named_parameters()},
        "pull": {name: full(value) for name, value in holdfast.penalty_gradient(model, known).items()},
        "rise": forecast.rise,
        "log density": float(spread.log_prob(model)),
        "draw": {name: full(v) for name, v in spread.sample(torch.Generator().manual_seed(4)).items()},
        "a draw by chance": failing(spread.sample),
    }


def failing(call, *args, **options) -> tuple[str, str]:
    try:
        call(*args, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def troubles(rank: int) -> dict:
    """An evaluation at odd moments, memories that differ, a precision that is zero on one rank's shard."""
    found = {}
    kind = kind_of("shards")
    x, y = examples(kind, 16)
    model, _ = wrapped("shards", 2)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with holdfast.hold(optimizer, model, memory(kind), num_data=40) as handle:
        for _ in range(3):
            mine = slice(8 * rank, 8 * rank + 8)
            nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
            with torch.no_grad():
                model(x[mine])
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(x[mine])
            told = handle.metrics()["holdfast/penalty"]
    found["looked at in between"] = (weights(model), told)
    for how in ("replicas", "shards"):
        model, _ = wrapped(how, 2)
        other = holdfast.Posterior(memory(kind).mean, (1 + rank) * memory(kind).precision)
        found[f"memories that differ, {how}"] = failing(
            holdfast.hold, OPTIMIZERS["sgd"](model.parameters()), model, other, num_data=40
        )
    model, _ = wrapped("shards", 2)
    known, own = memory(kind), (1 + rank) * memory(kind).precision
    moved = holdfast.Posterior({name: value + rank for name, value in known.mean.items()}, known.precision)
    found["Fishers that differ"] = failing(holdfast.consolidate, holdfast.prior(model), model, own)
    found["posteriors that differ"] = failing(holdfast.consolidate_, moved, model, holdfast.Diagonal({}))
    found["factors that differ"] = failing(holdfast.merge, placed(known, model), holdfast.Posterior(known.mean, own))
    before = weights(model)
    found["ways back that differ"] = failing(holdfast.restore_, model, moved)
    same = [torch.equal(before[name], value) for name, value in weights(model).items()]
    found["and nothing was moved"] = ("yes", str(all(same)))
    model, _ = wrapped("replicas", 2)
    found["num_data that differs"] = failing(
        holdfast.hold, OPTIMIZERS["sgd"](model.parameters()), model, memory(kind), num_data=40 * rank
    )
    model, _ = wrapped("shards", 2)
    found["mean field"] = failing(
        holdfast.mean_field, model, holdfast.prior(model, 1.0, mean=0.0), holdfast.categorical, num_data=10
    )
    entries = {name: torch.zeros_like(value) for name, value in memory(kind).mean.items()}
    entries["body.0.weight"][0] = 1.0  # the first rank's
    lopsided = holdfast.Posterior(memory(kind).mean, holdfast.Diagonal(entries))
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with holdfast.hold(optimizer, model, lopsided, num_data=40) as handle:
        trained(model, optimizer, "shards", rank, 2)
        found["a precision on one rank alone"] = (weights(model), handle.penalty)
    distributed.barrier()
    return found


def recursion(model: nn.Module, how: str, structure: str) -> dict:
    """Memories and Fishers, whole and in pieces, in every mixture: consolidated, merged, restored, expanded."""
    kind = kind_of(how)
    resharded(model)
    first = memory(kind, structure)
    x, y = examples(kind, 24, seed=5)
    fisher = FISHERS[structure](made(kind), [(x, y)], holdfast.categorical)
    moved = holdfast.Posterior({name: value + 0.1 for name, value in first.mean.items()}, fisher)
    found = {}
    for mine, theirs in itertools.product(("whole", "pieces"), repeat=2):
        one = placed(first, model) if mine == "pieces" else first
        other = placed(moved, model) if theirs == "pieces" else moved
        after = holdfast.consolidate(one, model, other.precision)
        product = holdfast.merge(one, other)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 1
        x_new, _ = examples(kind, 16)
        with torch.no_grad():
            model(x_new)  # `fully_shard` leaves the root whole
        holdfast.restore_(model, one)
        back = weights(model)
        larger = one.expanded(model)
        found[f"{mine}, {theirs}"] = {
            **{f"after {name}": full(value) for name, value in after.mean.items()},
            **{f"stiff {name}": full(value) for name, value in after.precision.diagonal().items()},
            **{f"product {name}": full(value) for name, value in product.mean.items()},
            **{f"back {name}": value for name, value in back.items()},
            **{f"larger {name}": full(value) for name, value in larger.mean.items()},
        }
    return found


def recursions(rank: int) -> dict:
    return {
        (how, structure): recursion(wrapped(how, 2)[0], how, structure)
        for how in ("shards", "tensor parallel")
        for structure in ("diagonal", "kronecker", "low rank")
    }


def narrow() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()


def narrow_data(rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(16, 5, generator=generator).double(), torch.randn(16, 1, generator=generator).double()
    return x[rank * 16 // ranks : (rank + 1) * 16 // ranks], y[rank * 16 // ranks : (rank + 1) * 16 // ranks]


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    start = narrow()
    known = holdfast.Posterior(
        {name: value.detach() + 0.3 for name, value in start.named_parameters()},
        holdfast.Diagonal({name: torch.ones_like(value.detach()) for name, value in start.named_parameters()}),
    )
    penalty = holdfast.penalty(model, known)
    return (model(x) - y).square().mean() + penalty / 10


def in_the_loss(rank: int) -> dict:
    model = narrow()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    loss_of(model, *narrow_data(rank, 2)).backward()
    return {name: full(parameter.grad) for name, parameter in model.named_parameters()}


SCENARIOS = {2: [rows_of_two, terms, budgets, surface, troubles, recursions, in_the_loss], 4: [rows_of_four]}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return gathered(tmp_path_factory, __file__, SCENARIOS)


def require_same(ranks, alone):
    for at, told in ranks:
        torch.testing.assert_close(at, alone[0], rtol=0, atol=1e-9)
        assert told == pytest.approx(alone[1], rel=1e-7, abs=1e-12)


@pytest.mark.parametrize("row", ROWS[2], ids=str)
def test_two_processes_are_one(found, row):
    require_same([rank[row] for rank in found["rows_of_two"]], held(row))


@pytest.mark.parametrize("row", ROWS[4], ids=str)
def test_four_processes_are_one(found, row):
    require_same([rank[row] for rank in found["rows_of_four"]], held(row))


@pytest.mark.parametrize("row", TERMS, ids=str)
def test_answers_hold_as_in_one_process(found, row):
    require_same([rank[row] for rank in found["terms"]], distilled(row))


@pytest.mark.filterwarnings("ignore::holdfast.HoldfastWarning")
@pytest.mark.parametrize("row", BUDGETS, ids=str)
def test_budgets_steer_as_in_one_process(found, row):
    require_same([rank[row] for rank in found["budgets"]], budgeted(row))


def test_numbers_are_of_the_whole_model(found):
    model = made(kind_of("shards"))
    known = memory(kind_of("shards"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1
    loss = holdfast.penalty(model, known)
    loss.backward()
    spread = holdfast.prior(model, precision=2.0)
    draw = spread.sample(torch.Generator().manual_seed(4))
    for rank in found["surface"]:
        assert rank["penalty"] == pytest.approx(float(loss.detach()), rel=1e-9)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(rank["gradient"][name], parameter.grad, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(rank["pull"][name], parameter.grad, rtol=1e-9, atol=1e-12)
        assert rank["rise"] == pytest.approx(holdfast.forecast(model, known).rise, rel=1e-9)
        assert rank["log density"] == pytest.approx(float(spread.log_prob(model).detach()), rel=1e-6)
        torch.testing.assert_close(rank["draw"], draw, rtol=1e-9, atol=1e-12)
        kind, said = rank["a draw by chance"]
        assert kind == "ArgumentError"
        assert "generator with one seed" in said


def test_a_look_at_the_model_between_passes_changes_nothing(found):
    kind = kind_of("shards")
    x, y = examples(kind, 16)
    model = made(kind)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with holdfast.hold(optimizer, model, memory(kind), num_data=40) as handle:
        for _ in range(3):
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        told = handle.penalty
    for at, penalty in (rank["looked at in between"] for rank in found["troubles"]):
        torch.testing.assert_close(at, weights(model), rtol=0, atol=1e-9)
        assert penalty == pytest.approx(told, rel=1e-7)


@pytest.mark.parametrize("how", ["replicas", "shards"])
def test_memories_that_differ_are_refused_on_every_rank(found, how):
    for rank in found["troubles"]:
        kind, said = rank[f"memories that differ, {how}"]
        assert kind == "MismatchError"
        assert "the same file on all of them" in said


@pytest.mark.parametrize(
    ("what", "of"),
    [
        ("Fishers that differ", "different Fishers: rank 1 differs from rank 0 in"),
        ("posteriors that differ", "different posteriors: rank 1 differs from rank 0 in `mean."),
        ("factors that differ", "different posteriors: rank 1 differs from rank 0 in `precision."),
        ("ways back that differ", "different memories: rank 1 differs from rank 0 in `mean."),
    ],
)
def test_no_mixture_is_made_of_what_ranks_bring(found, what, of):
    """Each would cut its own pieces from its own."""
    for rank in found["troubles"]:
        kind, said = rank[what]
        assert kind == "MismatchError"
        assert of in said
        assert rank["and nothing was moved"] == ("yes", "True")


def test_numbers_that_differ_are_refused_on_every_rank(found):
    for rank in found["troubles"]:
        kind, said = rank["num_data that differs"]
        assert kind == "MismatchError"
        assert "num_data=0, rank 1 with 40" in said
        assert rank["mean field"][0] == "ArgumentError"
        assert "by IVON" in rank["mean field"][1]


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "low rank"])
@pytest.mark.parametrize("how", ["shards", "tensor parallel"])
def test_the_recursion_the_product_and_the_way_back_take_what_is_whole_and_what_is_in_pieces(found, how, structure):
    kind = kind_of(how)
    alone = recursion(made(kind), how, structure)
    for rank in found["recursions"]:
        for mixed, values in rank[how, structure].items():
            torch.testing.assert_close(values, alone["whole, whole"], rtol=1e-7, atol=1e-9, msg=mixed)


def test_the_penalty_in_the_loss_is_right_where_an_axis_has_one_entry(found):
    model = narrow()
    loss_of(model, *narrow_data(0, 1)).backward()
    for rank in found["in_the_loss"]:
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(rank[name], parameter.grad, rtol=1e-9, atol=1e-12)


def test_a_precision_that_is_zero_on_a_ranks_own_shard_holds(found):
    (first, one), (second, other) = (rank["a precision on one rank alone"] for rank in found["troubles"])
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert one == pytest.approx(other)
    assert one > 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), SCENARIOS)
