"""The laws of forms, the table of rules, and what happens to a rule that is wrong."""

import pytest
import torch
from torch import nn

import holdfast
from holdfast.curvature import RULES, Form, Lookup, Products, Rows
from holdfast.curvature.forms import Limit, Shifted, add_outer_
from oracles import relative_errors, squares_loop

LIMIT = Limit(1 << 20)


def products(positions: int, groups: int = 1) -> Products:
    left, right = (torch.randn(6, groups, positions, size, dtype=torch.float64) for size in (4, 3))
    shape = torch.Size((groups * 4, 3))
    return Products.of(left, right, shape, inputs_left=False)


def shifted() -> Shifted:
    left, *rights = (torch.randn(6, 1, 5, size, dtype=torch.float64) for size in (4, 3, 3, 3, 3))
    shape = torch.Size((4, 3, 2, 2))
    pieces = [Products.of(left, right, shape[:2], inputs_left=False) for right in rights]
    whole = Products.of(left, torch.stack(rights, -1).flatten(-2), shape, inputs_left=False)
    return Shifted(tuple((lambda kept=piece: kept) for piece in pieces), lambda: whole, 6, shape)


FORMS = {
    "rows": lambda: Rows(torch.randn(6, 4, 3, dtype=torch.float64)),
    "lookup": lambda: Lookup(
        torch.randint(0, 5, (6, 4)), torch.randn(6, 4, 3, dtype=torch.float64), torch.Size((5, 3))
    ),
    "products of one position": lambda: products(1),
    "products of one position in groups": lambda: products(1, 2),
    "products": lambda: products(5),
    "products in groups": lambda: products(5, 2),
    "shifted": shifted,
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("memory", [1 << 20, 8 * 60])
def test_squares_are_those_of_the_gradients_written_out(name, memory):
    torch.manual_seed(0)
    form = FORMS[name]()
    total = torch.ones(form.shape, dtype=torch.float64)
    form.add_squares_(total, Limit(memory))
    written = form.scores(0, 6)
    assert written.shape == (6, *form.shape)
    torch.testing.assert_close(total, 1 + written.square().sum(0))


@pytest.mark.parametrize("name", FORMS)
def test_parts_of_a_form_are_its_parts(name):
    torch.manual_seed(0)
    form = FORMS[name]()
    written = form.scores(0, 6)
    torch.testing.assert_close(torch.cat([form.scores(0, 2), form.scores(2, 6)]), written)
    torch.testing.assert_close(form.only(3).scores(0, 1), written[3:4])
    assert form.only(3).examples == 1


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_one_weight_join_by_the_sum_of_their_gradients(name):
    torch.manual_seed(0)
    parts = [FORMS[name]() for _ in range(3)]
    whole = parts[0].with_more(parts[1:])
    written = sum(part.scores(0, 6) for part in parts)
    torch.testing.assert_close(whole.scores(0, 6), written)
    total = torch.zeros(whole.shape, dtype=torch.float64)
    whole.add_squares_(total, LIMIT)
    torch.testing.assert_close(total, written.square().sum(0))  # summed, then squared
    assert Rows(torch.zeros(6, 2)).with_more([products(1)]) is None


def test_products_of_another_number_of_groups_do_not_join():
    assert products(5).with_more([products(5, 2)]) is None
    assert products(5).with_more([products(4), products(5, 2)]) is None


@pytest.mark.parametrize(("rows", "columns"), [(4, 3), (320, 256)])  # made apart from their total, and into it
def test_outer_products_are_added_to_their_total(rows, columns):
    torch.manual_seed(0)
    left, right = (torch.randn(6, 1, 1, size, dtype=torch.float64) for size in (rows, columns))
    total = torch.ones(rows, columns, dtype=torch.float64)
    add_outer_(total, left, right)
    torch.testing.assert_close(total, 1 + sum(torch.outer(left[n, 0, 0], right[n, 0, 0]) for n in range(6)))


class Halves(Form):
    """A form of one's own, which says no more than its gradients: here one half of what it was given."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows, self.shape, self.examples = rows, rows.shape[1:], len(rows)

    def scores(self, start, stop):
        return self.rows[start:stop] / 2

    def only(self, example):
        return Halves(self.rows[example : example + 1])

    def with_more(self, others):
        return None


@pytest.mark.parametrize("memory", [1 << 20, 12 * 8 * 4, 12 * 8])  # all examples at once, four of them, and one
def test_a_form_of_ones_own_has_its_squares_from_its_gradients(memory):
    rows, total = torch.randn(6, 4, 3, dtype=torch.float64), torch.ones(4, 3, dtype=torch.float64)
    Halves(rows).add_squares_(total, Limit(memory))
    torch.testing.assert_close(total, 1 + rows.square().sum(0) / 4)


def test_a_transposed_total_takes_the_transposed_products():
    form = products(5)
    total = torch.zeros(3, 4, dtype=torch.float64).T
    form.add_squares_(total, LIMIT)
    torch.testing.assert_close(total, form.scores(0, 6).square().sum(0))


class Warp(torch.autograd.Function):
    """An operation of one's own: y = sin(w ∘ x)."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.sin(weight * x)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        slope = grad * torch.cos(weight * x)
        return slope * weight, (slope * x).sum(0)


class Warped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(4)), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(Warp.apply(x, self.weight))


@pytest.fixture
def warped():
    torch.manual_seed(0)
    return Warped().double(), (torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3)


def right(call, grad):
    x, weight = call.node.saved_tensors
    return Rows(call.rows(x * torch.cos(weight * x)).mul(grad).sum(1))


def test_an_operation_without_a_rule_goes_the_general_way(warped):
    model, batch = warped
    exact = squares_loop(model, batch, holdfast.categorical.nll)
    found = holdfast.coverage(model, [batch], holdfast.categorical)
    assert found.general == {"weight": "there is no rule for WarpBackward"}
    assert "the general way: there is no rule for WarpBackward" in str(found)
    assert found.fraction == pytest.approx(15 / 19)
    fisher = holdfast.diagonal_fisher(model, [batch], holdfast.categorical, targets="observed")
    assert max(relative_errors(fisher.entries, exact).values()) <= 1e-9


def test_a_rule_of_ones_own_serves(warped, monkeypatch):
    monkeypatch.setitem(RULES, "WarpBackward", right)
    model, batch = warped
    exact = squares_loop(model, batch, holdfast.categorical.nll)
    assert holdfast.coverage(model, [batch], holdfast.categorical).tapped["weight"] == ("Warp",)
    fisher = holdfast.diagonal_fisher(model, [batch], holdfast.categorical, targets="observed")
    assert max(relative_errors(fisher.entries, exact).values()) <= 1e-9


def test_a_rule_that_declines_leaves_it_to_the_general_path(warped, monkeypatch):
    monkeypatch.setitem(RULES, "WarpBackward", lambda call, grad: None)
    model, batch = warped
    assert "does not cover" in holdfast.coverage(model, [batch], holdfast.categorical).general["weight"]


@pytest.mark.parametrize("factor", [1.01, -2.0, 0.0])
def test_a_wrong_rule_is_refused_and_not_believed(warped, monkeypatch, factor):
    monkeypatch.setitem(RULES, "WarpBackward", lambda call, grad: Rows(factor * right(call, grad).rows))
    model, batch = warped
    with pytest.raises(holdfast.CheckError, match=r"disagree on `weight`.*two examples.*WarpBackward.*taps=False"):
        holdfast.diagonal_fisher(model, [batch], holdfast.categorical)
    exact = squares_loop(model, batch, holdfast.categorical.nll)
    fisher = holdfast.diagonal_fisher(model, [batch], holdfast.categorical, targets="observed", taps=False)
    assert max(relative_errors(fisher.entries, exact).values()) <= 1e-9


def test_a_rule_that_mixes_examples_is_refused(warped, monkeypatch):
    monkeypatch.setitem(RULES, "WarpBackward", lambda call, grad: Rows(right(call, grad).rows.roll(1, 0)))
    model, batch = warped
    with pytest.raises(holdfast.CheckError, match="`weight`"):
        holdfast.diagonal_fisher(model, [batch], holdfast.categorical)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda rows: Rows(rows[:1].expand_as(rows)), "disagree on `weight`"),  # the first example's for all
        (lambda rows: Rows(rows[:2]), "for each of 4 examples"),
        (lambda rows: Rows(rows.unsqueeze(1)), r"gradient of shape \(4,\)"),
        (lambda rows: rows, "as Rows, Products or Lookup"),
    ],
)
def test_rules_that_give_something_else_are_told_what_is_due(warped, monkeypatch, wrong, message):
    monkeypatch.setitem(RULES, "WarpBackward", lambda call, grad: wrong(right(call, grad).rows))
    model, batch = warped
    with pytest.raises(holdfast.CheckError, match=message):
        holdfast.diagonal_fisher(model, [batch], holdfast.categorical)


def test_a_kernel_is_the_same_entry_by_entry_and_as_a_whole():
    form = shifted()
    torch.testing.assert_close(form.whole().scores(0, 6), form.scores(0, 6))
    both = form.with_more([shifted()])
    torch.testing.assert_close(both.whole().scores(1, 4), both.scores(1, 4))
    torch.testing.assert_close(form.only(2).whole().scores(0, 1), form.scores(2, 3))
