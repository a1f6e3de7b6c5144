"""Examples must be separate: what looks like examples and is not, or sees its neighbors, is refused or done exactly."""

import pytest
import torch
from torch import nn

import holdfast
from cases import Case, PositionsLookLikeExamples, vectors
from oracles import fisher_loop, flat

FISHERS = [holdfast.diagonal_fisher, holdfast.dense_fisher]


class Squeezes(nn.Module):
    """A batch of one loses its axis."""

    def __init__(self, outputs):
        super().__init__()
        self.conv, self.head = nn.Conv1d(1, 3, 3), nn.Linear(9, outputs)

    def forward(self, x):
        return self.head(torch.tanh(self.conv(x.unsqueeze(1))).flatten(1)).squeeze()


class Centers(nn.Module):
    """Every example sees the mean of its batch."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv1d(1, 3, 3), nn.Linear(9, 3)

    def forward(self, x):
        hidden = torch.tanh(self.conv(x.unsqueeze(1))).flatten(1)
        return self.head(hidden - hidden.mean(0))


class TimeFirst(nn.Module):
    """With as many steps as examples, the time axis passes for the examples'."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(5, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.rnn(x)[0][-1])


class Random(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(nn.functional.dropout(x, 0.5, training=True))


@pytest.mark.parametrize("fisher", FISHERS)
@pytest.mark.parametrize(
    ("make", "likelihood", "data", "message"),
    [
        (lambda: Squeezes(2), holdfast.gaussian(), lambda: (torch.randn(4, 5), torch.randn(4, 2)), "squeeze"),
        (
            lambda: Squeezes(1),
            holdfast.gaussian(),
            lambda: (torch.randn(4, 5), torch.randn(4)),
            "squeeze",
        ),
        (Centers, holdfast.categorical, lambda: (torch.randn(4, 5), torch.arange(4) % 3), "see each other"),
        (TimeFirst, holdfast.categorical, lambda: (torch.randn(6, 6, 5), torch.arange(6) % 3), "a time axis in front"),
        (Random, holdfast.categorical, lambda: (torch.randn(4, 5), torch.arange(4) % 3), "random in evaluation mode"),
    ],
    ids=["squeeze", "squeeze-one", "centers", "time-first", "random"],
)
def test_models_whose_examples_are_not_separate_are_refused(fisher, make, likelihood, data, message):
    with pytest.raises(holdfast.DataError, match=message):
        fisher(make(), [data()], likelihood)


def test_every_form_of_batch_is_checked():
    class SometimesCenters(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(5, 3)

        def forward(self, x):
            return self.head(x - x.mean(0) if len(x) == 6 else x)

    batches = [(torch.randn(n, 5), torch.arange(n) % 3) for n in (4, 4, 6)]
    with pytest.raises(holdfast.DataError, match=r"batch 2.*see each other"):
        holdfast.diagonal_fisher(SometimesCenters(), batches, holdfast.categorical)


def test_a_small_influence_of_the_neighbors_is_seen():
    class Leaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(5, 3)

        def forward(self, x):
            return self.head(x + 0.03 * x.mean(0))

    with pytest.raises(holdfast.DataError, match="see each other"):
        holdfast.diagonal_fisher(Leaks(), [(torch.randn(4, 5) + 3, torch.arange(4) % 3)], holdfast.categorical)


def test_losses_and_inputs_that_cannot_be_used_are_named():
    y = torch.arange(4) % 3
    infinite = holdfast.custom(lambda output, target: output.sum(1) / 0, name="broken")
    with pytest.raises(holdfast.DataError, match="broken gave a value that is not finite"):
        holdfast.diagonal_fisher(nn.Linear(5, 3), [(torch.randn(4, 5), y)], infinite)
    with pytest.raises(holdfast.DataError, match="sparse"):
        holdfast.diagonal_fisher(nn.Linear(5, 3), [(torch.randn(4, 5).to_sparse(), y)], holdfast.categorical)


def test_batch_statistics_in_evaluation_mode_are_refused_by_name():
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3))
    with pytest.raises(holdfast.DataError, match=r"`1` normalizes by the statistics of the batch"):
        holdfast.diagonal_fisher(model, [(torch.randn(4, 5), torch.arange(4) % 3)], holdfast.categorical)


def test_texts_are_sliced_like_tensors():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.EmbeddingBag(26, 4), nn.Linear(4, 3)

        def forward(self, texts):
            ids = [torch.tensor([ord(c) - 97 for c in text]) for text in texts]
            starts = torch.tensor([0, *[len(i) for i in ids[:-1]]]).cumsum(0)
            return self.head(self.embed(torch.cat(ids), starts))

    torch.manual_seed(0)
    model = Reader().double()
    texts, labels = ["ab", "cde", "f", "ghab"], torch.tensor([0, 1, 2, 1])
    whole = holdfast.diagonal_fisher(
        model, [{"text": texts, "labels": labels}], holdfast.categorical,
        forward=lambda model, batch: model(batch["text"]),
    )  # fmt: skip
    one_by_one = sum(
        holdfast.diagonal_fisher(model, [([text], label.view(1))], holdfast.categorical)
        for text, label in zip(texts, labels, strict=True)
    )
    torch.testing.assert_close(flat(whole.entries), flat(one_by_one.entries))
    assert whole.num_data == one_by_one.num_data == 4


def test_a_layer_that_turns_positional_in_a_later_batch_of_the_same_form_is_caught():
    class Trims(nn.Module):
        """Padding is cut off inside, so that the number of positions is not in the batch's form."""

        def __init__(self):
            super().__init__()
            self.places = nn.Parameter(torch.randn(6, 4))
            self.lift, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            length = int((x != 0).any(0).sum())
            table = torch.tanh(self.lift(self.places[:length]))
            return self.head(torch.tanh(x[:, :length] @ table))

    case = Case("trims", Trims, holdfast.categorical, vectors(6, 3))
    ((x, y),) = case.batches((8,))
    short = x[4:].clone()
    short[:, 4:] = 0  # four positions, four examples
    batches = [(x[:4], y[:4]), (short, y[4:])]
    fisher = holdfast.diagonal_fisher(case.model(), batches, case.likelihood)
    loop = fisher_loop(case, case.model(), batches, "expected")
    torch.testing.assert_close(flat(fisher.entries), loop.diagonal(), rtol=1e-9, atol=1e-12)


def test_columns_that_cancel_do_not_blind_the_check():
    """Two classes at p = ½: the columns of the exact Fisher add up to zero."""

    class Even(PositionsLookLikeExamples):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 2)
            with torch.no_grad():
                for parameter in self.head.parameters():
                    parameter.copy_(parameter[:1].expand_as(parameter).clone())

    case = Case("even", Even, holdfast.categorical, vectors(4, 2))
    fisher = holdfast.diagonal_fisher(case.model(), case.batches((5,)), case.likelihood)
    loop = fisher_loop(case, case.model(), case.batches((5,)), "expected")
    torch.testing.assert_close(flat(fisher.entries), loop.diagonal(), rtol=1e-9, atol=1e-12)


def test_inputs_given_by_name_are_tapped():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Linear(5, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(input=torch.tanh(self.first(input=x)))

    case = Case("named", Named, holdfast.categorical, vectors(5, 3))
    fisher = holdfast.diagonal_fisher(case.model(), case.batches(), case.likelihood)
    loop = fisher_loop(case, case.model(), case.batches(), "expected")
    torch.testing.assert_close(flat(fisher.entries), loop.diagonal(), rtol=1e-9, atol=1e-12)


def test_datasets_are_told_apart_by_order_within_an_example_and_by_pairing_and_not_by_cuts():
    model = nn.Linear(4, 3).double()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])

    def identity(*batches):
        return holdfast.diagonal_fisher(model, batches, holdfast.categorical).sources[0].id

    same = identity((x, y))
    rows = torch.randperm(6)
    assert same == identity((x[:2], y[:2]), (x[2:], y[2:])) == identity((x[rows], y[rows]))
    others = {identity((x.flip(1), y)), identity((x, y.roll(1))), identity((x[:5], y[:5])), identity((x + 1e-9, y))}
    assert len(others) == 4
    pair = nn.Bilinear(4, 4, 3).double()
    swapped = [holdfast.diagonal_fisher(pair, [(a, b, y)], holdfast.categorical) for a, b in ((x, x + 1), (x + 1, x))]
    assert swapped[0].sources[0].id != swapped[1].sources[0].id
    assert same not in others


def test_looking_rows_up_does_not_rescale_them_for_good():
    model = nn.Sequential(nn.Embedding(5, 4, max_norm=0.1), nn.Flatten(), nn.Linear(8, 3))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    holdfast.diagonal_fisher(model, [(torch.tensor([[0, 1]]), torch.tensor([0]))], holdfast.categorical)
    assert torch.equal(model[0].weight, torch.ones(5, 4))


@pytest.mark.parametrize("call", [
    lambda: holdfast.diagonal_fisher([(torch.zeros(1, 2), None)], nn.Linear(2, 2), holdfast.categorical),
    lambda: holdfast.prior(nn.Linear(2, 2).parameters()),
    lambda: holdfast.prior(nn.Linear(2, 2).state_dict()),
    lambda: holdfast.prior(nn.Linear(2, 2), mean="zero"),
    lambda: holdfast.prior(nn.Linear(2, 2, dtype=torch.complex64)),
    lambda: holdfast.diagonal_fisher(nn.Linear(2, 2), [], holdfast.categorical, seed=None),
    lambda: holdfast.hutchinson_hessian(nn.Linear(2, 2), [], holdfast.categorical, probes=1.5),
    lambda: holdfast.custom(lambda output, target: output, unit="token"),
    lambda: holdfast.custom("cross-entropy"),
])  # fmt: skip
def test_arguments_of_the_wrong_kind_are_refused(call):
    with pytest.raises(holdfast.ArgumentError):
        call()


def test_empty_parameters_and_compiled_children_have_a_hessian():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.empty = nn.Parameter(torch.zeros(0))
            self.body = torch.compile(nn.Linear(3, 3), backend="aot_eager")
            self.head = nn.Linear(3, 2)

        def forward(self, x):
            return self.head(torch.tanh(self.body(x))) + self.empty.sum()

    model = Odd().double()
    data = [(torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0]))]
    found = holdfast.diagonal_hessian(model, data, holdfast.categorical)
    assert found.entries["empty"].shape == (0,)
    fisher = holdfast.diagonal_fisher(model, data, holdfast.categorical)
    torch.testing.assert_close(found.entries["head.weight"], fisher.entries["head.weight"])


@pytest.mark.parametrize("function", [*FISHERS, holdfast.batch_sum_fisher])
def test_a_loss_that_compares_examples_is_refused(function):
    contrast = holdfast.custom(lambda output, target: (output - output.mean(0)).square().sum(1), name="contrast")
    batch = (torch.randn(4, 5), torch.randn(4, 3))
    with pytest.raises(holdfast.DataError, match="another loss alone"):
        function(nn.Linear(5, 3), [batch], contrast, targets="observed")


def test_batch_statistics_in_training_mode_are_refused_with_the_reason():
    class Stubborn(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Linear(5, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(nn.functional.batch_norm(self.first(x), None, None, training=True))

    with pytest.raises(holdfast.DataError, match="batch statistics in training mode"):
        holdfast.diagonal_fisher(Stubborn(), [(torch.randn(4, 5), torch.arange(4) % 3)], holdfast.categorical)


@pytest.mark.parametrize("function", [*FISHERS, holdfast.diagonal_hessian])
def test_sharded_parameters_are_refused_and_not_half_counted(function, tmp_path):
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.Linear(5, 3)
        model.weight = nn.Parameter(distribute_tensor(model.weight.data, init_device_mesh("cpu", (1,))))
        with pytest.raises(holdfast.ArgumentError, match=r"`weight` is sharded over processes.*batch_sum_fisher"):
            function(model, [(torch.randn(4, 5), torch.arange(4) % 3)], holdfast.categorical)
    finally:
        distributed.destroy_process_group()
