"""A memory that stays on the CPU, brought to the model piece by piece: the same steps, whatever it is kept in."""

import contextlib
import copy
import itertools

import pytest
import torch
from torch import nn

import holdfast
from holdfast import ArgumentError
from holdfast.hold import prefetch
from holdfast.hold.prefetch import Prefetch, offloaded
from holdfast.kernels.codes import Codes

CPU = torch.device("cpu")


def learned():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 5))
    x, y = torch.randn(60, 20), torch.arange(60) % 5
    fisher = holdfast.diagonal_fisher(model, [(x, y)], holdfast.categorical)
    return model, holdfast.consolidate(holdfast.prior(model), model, fisher), (x, y)


STORED = {
    "float32": lambda known: known,
    "bfloat16": lambda known: known.to(dtype=torch.bfloat16),
    "8 bits": lambda known: known.compact(),
    "8 bits, mean in bfloat16": lambda known: known.compact().to(dtype=torch.bfloat16),
    "one number": lambda known: holdfast.Posterior(known.mean, holdfast.prior(learned()[0], 3.0).precision),
}
WAYS = {
    "gradient": (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), {"proximal": False}),
    "step of its own": (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), {}),
    "Adam": (lambda p: torch.optim.Adam(p, lr=1e-2), {}),
    "Adam, a step of its own": (lambda p: torch.optim.Adam(p, lr=1e-2), {"proximal": True}),
    "with a closure": (lambda p: torch.optim.LBFGS(p, max_iter=4), {}),
}


def held(posterior, way, frozen=False, **options):
    model, _, (x, y) = learned()
    make, how = WAYS[way]
    model[2].bias.requires_grad_(not frozen)
    optimizer = make([p for p in model.parameters() if p.requires_grad])

    def passed(step):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.roll(step, 1)), y)
        loss.backward()
        return loss

    with holdfast.hold(optimizer, model, posterior, num_data=60, strength=3.0, **how, **options) as handle:
        for step in range(4):
            if way == "with a closure":
                optimizer.step(lambda step=step: passed(step))
            else:
                passed(step)
                optimizer.step()
        told = handle.metrics()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), told


@pytest.mark.parametrize(("stored", "way"), list(itertools.product(STORED, WAYS)), ids=str)
def test_the_steps_are_those_of_a_memory_on_the_device(stored, way, monkeypatch):
    """In pieces so small that each buffer is filled many times over."""
    monkeypatch.setattr(prefetch, "SIZE", 256)
    posterior = STORED[stored](learned()[1])
    here, there = held(posterior, way), held(posterior, way, offload=True)
    torch.testing.assert_close(there[0], here[0], rtol=1e-5, atol=1e-6)
    assert there[1] == pytest.approx(here[1], rel=1e-4)
    assert not torch.allclose(here[0], held(holdfast.prior(learned()[0]), way if "own" not in way else "Adam")[0])


@pytest.mark.parametrize("way", WAYS)
def test_a_frozen_parameter_is_left_alone(way):
    posterior = learned()[1].compact()
    here, there = held(posterior, way, frozen=True), held(posterior, way, frozen=True, offload=True)
    torch.testing.assert_close(there[0], here[0], rtol=1e-5, atol=1e-6)
    assert torch.equal(there[0][-5:], posterior.mean["2.bias"])


def test_it_comes_in_two_buffers_a_piece_at_a_time(monkeypatch):
    monkeypatch.setattr(prefetch, "SIZE", 512)
    params = [torch.arange(1000), torch.arange(1000, 1800).view(40, 20)]
    means = [torch.arange(1000.0), torch.arange(800.0).view(40, 20).to(torch.bfloat16)]
    entries = [Codes(torch.arange(1000).to(torch.uint8), torch.arange(4, dtype=torch.int16), 2.0), torch.rand(40, 20)]
    bring = Prefetch(CPU)
    for _ in range(2):  # the second time in the buffers of the first
        sizes, places = [], []
        for (param,), (mean,), (entry,) in bring(params, means=means, entries=entries):
            which = int(param[0] >= 1000)
            at = slice(int(param[0]) - 1000 * which, int(param[-1]) + 1 - 1000 * which)
            assert torch.equal(mean, means[which].view(-1)[at])
            if which:
                assert torch.equal(entry, entries[1].view(-1)[at])
            else:
                assert torch.equal(entry.unpacked(), entries[0].unpacked()[at])
            sizes.append(len(param))
            places.append(mean.untyped_storage().data_ptr())
        assert sizes == [512, 488, 512, 288]
    assert len(set(places)) == 2
    assert places[::2] == places[:1] * 2


def test_small_tensors_come_together(monkeypatch):
    monkeypatch.setattr(prefetch, "SIZE", 512)
    sizes = [10, 300, 200, 600, 0, 5, 1, 512]
    means, entries, params = ([torch.rand(size) for size in sizes] for _ in range(3))
    entries[1] = Codes(torch.arange(300).to(torch.uint8), torch.arange(2, dtype=torch.int16), 2.0)
    found = [[mean.clone() for mean in lot] for _, lot, _ in Prefetch(CPU)(params, means=means, entries=entries)]
    assert [[len(mean) for mean in lot] for lot in found] == [[10, 300, 200], [512], [88, 0, 5, 1], [512]]
    assert torch.equal(torch.cat([mean for lot in found for mean in lot]), torch.cat(means))
    read = [
        entry.unpacked() if isinstance(entry, Codes) else entry.clone()
        for _, _, lot in Prefetch(CPU)(params, means=means, entries=entries)
        for entry in lot
    ]
    entries[1] = entries[1].unpacked()
    assert torch.equal(torch.cat(read), torch.cat(entries))


def test_what_was_brought_is_given_back_when_the_hold_ends():
    model, posterior, (x, y) = learned()
    optimizer = torch.optim.Adam(model.parameters())
    with holdfast.hold(optimizer, model, posterior, num_data=60, offload=True) as handle:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        (term,) = handle._terms
        assert all(len(room) for room in term.brought._rooms[:1])
    assert [len(room) for room in term.brought._rooms] == [0, 0]
    assert handle.penalty > 0  # which makes room again


class Stream:
    """What is asked of a GPU's stream, written down."""

    def __init__(self, name: str, log: list):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append((self.name, "waits for all of", other.name))

    def wait_event(self, event):
        self.log.append((self.name, "waits for", event))

    def record_event(self):
        self.log.append((self.name, "has done", len(self.log)))
        return self.log[-1]


def test_no_buffer_is_read_before_it_is_filled_nor_filled_before_it_was_read(monkeypatch):
    monkeypatch.setattr(prefetch, "SIZE", 256)
    log = []
    side, now = Stream("side", log), Stream("now", log)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext(log.append(("side", "copies"))))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    bring = Prefetch(CPU)
    bring._stream = side
    for _ in bring([torch.zeros(1024)], means=[torch.zeros(1024)], entries=[torch.zeros(1024)]):
        log.append(("now", "reads"))
    copied = [index for index, each in enumerate(log) if each == ("side", "copies")]
    read = [index for index, each in enumerate(log) if each == ("now", "reads")]
    assert len(copied) == len(read) == 4
    for turn, index in enumerate(read):  # the device waits until this piece is there, and the next is on its way
        assert log[index - 1] == ("now", "waits for", log[copied[turn] + 1])
        assert log[copied[turn] + 1][:2] == ("side", "has done")
        assert turn == 3 or copied[turn + 1] < index
    for turn in (2, 3):  # a copy waits until what was in its place has been read
        assert log[copied[turn] - 1] == ("side", "waits for", log[read[turn - 2] + 1])
        assert log[read[turn - 2] + 1][:2] == ("now", "has done")
    assert log[0] == ("side", "waits for all of", "now")


def test_the_memory_stays_where_it_is():
    model, posterior, _ = learned()
    known, bring = offloaded(posterior.compact(), model)
    assert {tensor.device for tensor in (*known.mean.values(), *known.precision.tensors.values())} == {CPU}
    assert isinstance(bring, Prefetch)
    assert known.id == posterior.compact().id


def test_a_budget_is_kept_with_it():
    ends = []
    for offload in (False, True):
        model, posterior, (x, y) = learned()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.warns(holdfast.HoldfastWarning, match="quadratic"):
            handle = holdfast.hold(optimizer, model, posterior, num_data=60, budget=0.01, offload=offload)
        for _ in range(12):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x.roll(1, 1)), y).backward()
            optimizer.step()
        ends.append(handle.finish())
        handle.detach()
    assert ends[1].rise == pytest.approx(ends[0].rise, rel=1e-4)
    assert ends[1].strength == pytest.approx(ends[0].strength, rel=1e-4)


def test_what_cannot_be_brought_is_refused_with_what_to_do():
    model, posterior, data = learned()
    optimizer = torch.optim.Adam(model.parameters())
    kronecker = holdfast.consolidate(
        holdfast.prior(model), model, holdfast.kronecker_fisher(model, [data], holdfast.categorical)
    )
    with pytest.raises(ArgumentError, match=r"keeps diagonals on the CPU.*Kronecker.*holdfast\.Diagonal"):
        holdfast.hold(optimizer, model, kronecker, num_data=60, offload=True)
    with pytest.raises(ArgumentError, match="every=1"):
        holdfast.hold(optimizer, model, posterior, num_data=60, offload=True, every=2)
    term = holdfast.distill(model, copy.deepcopy(model), holdfast.kept_inputs(data[0]), holdfast.categorical)
    with pytest.raises(ArgumentError, match="a posterior to bring"):
        holdfast.hold(optimizer, model, term, num_data=60, offload=True)
    spread = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ArgumentError, match="the model is on 2"):
        offloaded(holdfast.Posterior({n: torch.zeros(p.shape) for n, p in spread.named_parameters()},
                                     holdfast.Diagonal({})), spread)  # fmt: skip


def test_parameters_that_are_not_in_one_piece_go_the_general_way():
    torch.manual_seed(0)
    ends = []
    for offload in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2)).to(memory_format=torch.channels_last)
        assert not model[0].weight.is_contiguous()
        posterior = holdfast.prior(model, precision=2.0).to(dtype=torch.float32)
        entries = {name: torch.rand_like(value) + 0.5 for name, value in posterior.mean.items()}
        known = holdfast.Posterior(posterior.mean, holdfast.Logarithmic.of(holdfast.Diagonal(entries)))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        with holdfast.hold(optimizer, model, known, num_data=8, offload=offload):
            for step in range(3):
                optimizer.zero_grad()
                model(torch.randn(8, 3, 3, 3, generator=torch.Generator().manual_seed(step))).square().mean().backward()
                optimizer.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-7)
