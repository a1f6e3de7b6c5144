import pytest
import torch
from torch import nn

import holdfast
from cases import CASES, DataParallel, relu_mlp
from oracles import flat

CASE = CASES[0]


def moved(posterior_of=holdfast.diagonal_fisher):
    model = CASE.model()
    posterior = holdfast.consolidate(holdfast.prior(model), model, posterior_of(model, CASE.batches(), CASE.likelihood))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter)
    return model, posterior


@pytest.mark.parametrize("structure", [holdfast.diagonal_fisher, holdfast.dense_fisher])
def test_the_penalty_is_half_the_quadratic_and_its_gradient_needs_no_graph(structure):
    model, posterior = moved(structure)
    delta = flat(dict(model.named_parameters())) - flat(posterior.mean)
    value = holdfast.penalty(model, posterior)
    torch.testing.assert_close(value, 0.5 * delta @ posterior.precision.dense() @ delta)
    grads = torch.autograd.grad(value, list(model.parameters()))
    analytic = holdfast.penalty_gradient(model, posterior)
    assert not any(gradient.requires_grad for gradient in analytic.values())
    for (name, _), grad in zip(model.named_parameters(), grads, strict=True):
        torch.testing.assert_close(analytic[name], grad)


def test_it_is_zero_at_the_mean():
    model, posterior = moved()
    holdfast.restore_(model, posterior)
    assert float(holdfast.penalty(model, posterior).detach()) == 0


def test_under_autocast_it_keeps_its_precision():
    model, posterior = moved(holdfast.dense_fisher)
    model, posterior = model.float(), posterior.to(dtype=torch.float32)
    exact = holdfast.penalty(model, posterior)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(holdfast.penalty(model, posterior), exact, rtol=1e-6, atol=0)


def test_a_half_precision_memory_still_measures_small_moves():
    """The difference of two close bfloat16 numbers is taken in float32."""
    torch.manual_seed(0)
    model = nn.Linear(50, 50).double()
    posterior = holdfast.prior(model, precision=1.0).to(dtype=torch.bfloat16)
    holdfast.restore_(model, posterior)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1.001
    moved_by = sum((0.001 * value.double()).square().sum() for value in posterior.mean.values())
    torch.testing.assert_close(holdfast.penalty(model, posterior), 0.5 * moved_by, rtol=1e-6, atol=0)


def test_wrapped_models_have_the_same_penalty():
    model, posterior = moved()
    exact = holdfast.penalty(model, posterior)
    for wrapped in (DataParallel(model), torch.compile(model, backend="eager")):
        assert torch.equal(holdfast.penalty(wrapped, posterior), exact)


def test_another_model_is_refused_and_the_names_are_listed():
    _, posterior = moved()
    with pytest.raises(holdfast.InertError, match=r"memory has `0.weight`.*model has `weight`, `bias`"):
        holdfast.penalty(nn.Linear(5, 3), posterior)
    with pytest.raises(holdfast.MismatchError, match=r"`4.weight`, `4.bias`, which the model lacks"):
        holdfast.penalty(relu_mlp()[:4], posterior)


def test_a_precision_that_is_zero_though_it_had_data_is_refused():
    model = CASE.model()
    fisher = holdfast.diagonal_fisher(model, CASE.batches(), CASE.likelihood)
    nothing = holdfast.Diagonal({name: torch.zeros_like(e) for name, e in fisher.entries.items()}, fisher.sources)
    with pytest.raises(holdfast.InertError, match="zero everywhere although it stands for 7 examples"):
        holdfast.penalty(model, holdfast.consolidate(holdfast.prior(model), model, nothing))
