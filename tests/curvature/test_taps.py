"""The tap engine against a loop of one, over the layers and models that people have."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import holdfast
from holdfast.curvature import engine, trial
from oracles import relative_errors, squares_loop

CLASSES = 3

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning"),
]


class Ends(nn.Module):
    """Any body, then a linear head on what it gives."""

    def __init__(self, body: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(body(torch.randn(2, *shape)).flatten(1).shape[1], CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)).flatten(1))


def conv(kind: type[nn.Module], *shape: int, **options: object) -> tuple[object, tuple[int, ...]]:
    return lambda: kind(shape[0], 4, 3, **options), shape


LAYERS = {
    "linear": (lambda: nn.Linear(5, 4), (5,)),
    "linear without bias": (lambda: nn.Linear(5, 4, bias=False), (5,)),
    "linear over a sequence": (lambda: nn.Linear(5, 4), (6, 5)),
    "linear over a sequence without bias": (lambda: nn.Linear(5, 4, bias=False), (6, 5)),
    "linear over three inner axes": (lambda: nn.Linear(5, 4), (2, 3, 2, 5)),
    "conv1d": conv(nn.Conv1d, 4, 9, stride=2, padding=1, dilation=2, groups=2),
    "conv2d": conv(nn.Conv2d, 3, 7, 8),
    "conv2d with stride": conv(nn.Conv2d, 3, 8, 8, stride=(2, 3)),
    "conv2d with padding": conv(nn.Conv2d, 3, 6, 6, padding=(2, 1)),
    "conv2d with padding by name": conv(nn.Conv2d, 3, 6, 6, padding="same"),
    "conv2d with even padding by name": (lambda: nn.Conv2d(3, 4, 4, padding="same"), (3, 6, 6)),
    "conv2d with dilation": conv(nn.Conv2d, 3, 8, 8, dilation=2),
    "conv2d in groups": conv(nn.Conv2d, 4, 6, 6, groups=2),
    "conv2d by depth": conv(nn.Conv2d, 4, 6, 6, groups=4),
    "conv2d without bias": conv(nn.Conv2d, 3, 6, 6, bias=False),
    "conv2d with reflected padding": conv(nn.Conv2d, 3, 6, 6, padding=1, padding_mode="reflect"),
    "conv2d with circular padding": conv(nn.Conv2d, 3, 6, 6, padding=2, padding_mode="circular"),
    "conv2d with replicated padding": conv(nn.Conv2d, 3, 6, 6, padding=1, padding_mode="replicate"),
    "conv2d of one pixel": (lambda: nn.Conv2d(3, 4, 1, stride=2), (3, 6, 6)),
    "conv2d of many channels": (lambda: nn.Conv2d(18, 20, 3, stride=2, padding=1, dilation=2), (18, 9, 8)),
    "conv2d of many channels, in lines": (lambda: nn.Conv2d(18, 5, 3, padding=1, dilation=(1, 2)), (18, 12, 14)),
    "conv2d of many channels in groups, in lines": (lambda: nn.Conv2d(32, 6, (3, 2), groups=2), (32, 9, 9)),
    "conv1d of many channels": (lambda: nn.Conv1d(16, 3, 4, padding=2, dilation=3), (16, 20)),
    "conv1d of many channels with stride": (lambda: nn.Conv1d(16, 3, 3, stride=2), (16, 20)),
    "conv3d of many channels": (lambda: nn.Conv3d(16, 3, (2, 1, 2)), (16, 5, 4, 9)),
    "conv2d of many channels in groups": (lambda: nn.Conv2d(36, 6, (3, 2), groups=2), (36, 5, 5)),
    "conv2d over all of an image": (lambda: nn.Conv2d(3, 4, 6), (3, 6, 6)),
    "conv2d over all of an image, in groups": (lambda: nn.Conv2d(36, 4, (5, 5), groups=2), (36, 5, 5)),
    "squeezed and excited": (lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 3, 1)), (4, 5, 5)),
    "conv3d": conv(nn.Conv3d, 2, 5, 6, 5, stride=(1, 2, 1), padding=(0, 1, 1), dilation=(1, 1, 2)),
    "transposed conv1d": conv(nn.ConvTranspose1d, 2, 6, stride=2, output_padding=1),
    "transposed conv2d": conv(nn.ConvTranspose2d, 4, 5, 4, stride=2, padding=1, dilation=(1, 2), groups=2),
    "transposed conv3d": conv(nn.ConvTranspose3d, 2, 3, 3, 4, stride=(1, 2, 1)),
    "transposed conv2d of many channels, in lines": (lambda: nn.ConvTranspose2d(5, 18, 2, padding=1), (5, 9, 9)),
    "transposed conv2d of many channels": (lambda: nn.ConvTranspose2d(5, 18, 3, stride=2), (5, 4, 4)),
    "layer norm": (lambda: nn.LayerNorm(5), (6, 5)),
    "layer norm over two axes": (lambda: nn.LayerNorm((3, 5)), (6, 3, 5)),
    "layer norm without bias": (lambda: nn.LayerNorm(5, bias=False), (5,)),
    "rms norm": (lambda: nn.RMSNorm(5), (6, 5)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (4, 5, 3)),
    "instance norm": (lambda: nn.InstanceNorm2d(4, affine=True), (4, 5, 3)),
    "instance norm with statistics": (lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True), (4, 5)),
    "batch norm 1d": (lambda: warmed(nn.BatchNorm1d(5), (5,)), (5,)),
    "batch norm 1d over a sequence": (lambda: warmed(nn.BatchNorm1d(4), (4, 5)), (4, 5)),
    "batch norm 2d": (lambda: warmed(nn.BatchNorm2d(4), (4, 5, 3)), (4, 5, 3)),
    "batch norm 3d": (lambda: warmed(nn.BatchNorm3d(2), (2, 3, 3, 3)), (2, 3, 3, 3)),
    "prelu": (lambda: nn.PReLU(), (6, 5)),
    "prelu by channel": (lambda: nn.PReLU(4), (4, 5, 3)),
    "attention": (lambda: Attends(batch_first=True), (6, 8)),
    "attention, time first": (lambda: Attends(batch_first=False), (6, 8)),
    "attention across": (lambda: Attends(batch_first=True, across=True), (6, 8)),
    "attention with other widths": (lambda: Attends(batch_first=True, across=True, kdim=8, vdim=8), (6, 8)),
    "attention with a learned key": (lambda: Attends(batch_first=True, add_bias_kv=True), (6, 8)),
    "lstm": (lambda: First(nn.LSTM(5, 4, batch_first=True)), (6, 5)),
    "lstm, two ways, two layers, time first": (lambda: TimeFirst(nn.LSTM(5, 4, 2, bidirectional=True)), (6, 5)),
    "lstm with a projection": (lambda: First(nn.LSTM(5, 4, proj_size=3, batch_first=True)), (6, 5)),
    "gru": (lambda: First(nn.GRU(5, 4, batch_first=True)), (6, 5)),
    "gru, two ways": (lambda: First(nn.GRU(5, 4, batch_first=True, bidirectional=True)), (6, 5)),
    "rnn": (lambda: First(nn.RNN(5, 4, batch_first=True)), (6, 5)),
    "cells by hand": (lambda: Cells(), (6, 5)),
    "transformer encoder": (lambda: encoder(batch_first=True), (6, 8)),
    "transformer encoder, norm first": (lambda: encoder(batch_first=True, norm_first=True), (6, 8)),
    "transformer encoder, time first": (lambda: TimeFirst(encoder(batch_first=False)), (6, 8)),
    "flattened by hand": (lambda: Flattens(), (6, 5)),
    "flattened by hand, time first": (lambda: Flattens(time_first=True), (6, 5)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(5, 4)), (6, 5)),
    "bare parameters": (lambda: Bare(), (6, 5)),
    "bare parameters on the left": (lambda: Lefts(), (6, 5)),
    "weights repeated within an example": (lambda: Repeats(), (6, 5)),
    "einsum": (lambda: Einsum(), (6, 5)),
    "one layer three times": (lambda: Thrice(nn.Linear(5, 5)), (6, 5)),
    "one convolution three times": (lambda: Thrice(nn.Conv2d(2, 2, 3, padding=1)), (2, 5, 5)),
    "one wide convolution three times": (lambda: Thrice(nn.Conv2d(18, 18, 3, padding=1)), (18, 3, 3)),
    "one norm three times": (lambda: Thrice(nn.GroupNorm(2, 4)), (4, 5)),
    "video": (lambda: Video(), (4, 2, 5, 5)),
    "slices of one weight": (lambda: Slices(), (6, 5)),
    "bilinear": (lambda: Pairs(), (6, 5)),
    "resnet": (lambda: resnet(), (3, 8, 8)),
}  # fmt: skip
# What no rule serves, and why; everything else is tapped in full.
GENERAL = {
    "bilinear": {"body.bilinear.weight": "Trilinear"},
    "weights repeated within an example": {"body.twice": "does not cover this use"},
}


def warmed(norm: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    for _ in range(3):
        norm(3 * torch.randn(16, *shape) + 1)  # statistics that are not 0 and 1
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)
    return norm


class Attends(nn.Module):
    def __init__(self, batch_first: bool, across: bool = False, **options: object) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=batch_first, **options)
        self.batch_first, self.across = batch_first, across

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        other = x.flip(-1) * 0.5 if self.across else x
        found = self.attention(x, other, other, need_weights=False)[0]
        return found if self.batch_first else found.transpose(0, 1)


class First(nn.Module):
    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0][:, -1]


class TimeFirst(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(x.transpose(0, 1))
        return (found[0] if isinstance(found, tuple) else found).transpose(0, 1)


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.other = nn.GRUCell(5, 4), nn.LSTMCell(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, state = x.new_zeros(len(x), 4), (x.new_zeros(len(x), 3), x.new_zeros(len(x), 3))
        for step in x.unbind(1):
            h = self.cell(step, h)
            state = self.other(h, state)
        return state[0]


def encoder(**options: object) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, activation="gelu", **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Flattens(nn.Module):
    """Positions and examples in one axis, through several layers, as much code does."""

    def __init__(self, time_first: bool = False) -> None:
        super().__init__()
        self.time_first = time_first
        self.first, self.norm, self.second = nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1) if self.time_first else x
        flat = self.second(torch.relu(self.norm(self.first(x.reshape(-1, 5)))))
        found = flat.view(*x.shape[:2], 3)
        return found.transpose(0, 1) if self.time_first else found


class Bare(nn.Module):
    """Class tokens, positions, scales, shifts, temperatures: parameters without a module of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 5))
        self.positions = nn.Parameter(torch.randn(1, 9, 5))
        self.scale, self.shift = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(7, 1))
        self.temperature, self.offset = nn.Parameter(torch.rand(()) + 0.5), nn.Parameter(torch.randn(7, 5))
        self.table = nn.Parameter(torch.randn(4, 5))
        self.unused = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions[:, :7]
        x = self.scale * x / self.temperature - self.offset
        return x * (1 + self.shift) + torch.tanh(self.table)[torch.arange(7) % 4]


class Lefts(nn.Module):
    """What is taken from a parameter, divided into it, and added to it several times."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.over = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(6, 1))
        self.thrice, self.less = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.whole - x) + self.over / (2 + torch.tanh(x))
        return torch.tanh(torch.add(x, self.thrice, alpha=3)) + torch.tanh(torch.sub(x, self.less, alpha=2))


class Repeats(nn.Module):
    """A row for every example, and one that every example has several times."""

    def __init__(self) -> None:
        super().__init__()
        self.once, self.twice = nn.Parameter(torch.randn(1, 6, 5)), nn.Parameter(torch.randn(1, 3, 5))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tanh(self.once.repeat(len(x), 1, 1)) + torch.sin(self.twice.repeat(len(x), 2, 1) * x)


class Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.heads = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(2, 3, 2))
        self.out = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.einsum("bti,io->bto", x, self.mix)
        parts = torch.einsum("bthi,hoi->btho", x.unflatten(-1, (2, 2)), self.heads).flatten(2)
        return torch.cat([parts, torch.tanh(x) @ self.out.T], -1)


class Thrice(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.layer(x))
        return x


class Video(nn.Module):
    """Frames folded into the batch: a convolution's first axis holds several of each example's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 3, 3), nn.GroupNorm(1, 3)
        self.batch_norm = warmed(nn.BatchNorm2d(3), (3, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.batch_norm(self.norm(self.conv(x.flatten(0, 1))))).view(*x.shape[:2], -1)


class Slices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 5))

    def forward(self, x: Tensor) -> Tensor:
        apart = F.linear(x, self.weight[:3]) + F.linear(x.flip(1), self.weight[3:6])
        return torch.tanh(apart) * F.linear(x, self.weight[5:]).sum(-1, keepdim=True) + self.weight[0, :3]


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(5, 5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.bilinear(x, x.flip(1))


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(warmed(nn.BatchNorm2d(outside), (outside, 4, 4)) for _ in range(2))
        self.short = nn.Conv2d(inside, outside, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)), inplace=True)))
        return F.relu(inner + self.short(x))


def resnet() -> nn.Module:
    stem = [nn.Conv2d(3, 16, 3, padding=1), warmed(nn.BatchNorm2d(16), (16, 4, 4)), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*stem, Residual(16, 16, 1), Residual(16, 20, 2), nn.AdaptiveAvgPool2d(1))


def case(name: str, dtype: torch.dtype, size: int = 5) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    make, shape = LAYERS[name]
    torch.manual_seed(4)
    model = Ends(make(), shape).to(dtype)
    return model, (torch.randn(size, *shape, dtype=dtype), torch.arange(size) % CLASSES)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("size", [2, 5, 6])  # six: as many examples as positions
def test_every_layer_equals_a_loop_over_examples(name, size):
    model, batch = case(name, torch.float64, size)
    exact = squares_loop(model, batch, holdfast.categorical.nll)
    fisher = holdfast.diagonal_fisher(model, [batch], holdfast.categorical, targets="observed")
    errors = relative_errors(fisher.entries, exact)
    assert max(errors.values()) <= 1e-9, errors


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_is_served_by_taps(name):
    """Otherwise the comparison with the loop would compare the loop with itself."""
    model, batch = case(name, torch.float64)
    found = holdfast.coverage(model, [batch], holdfast.categorical)
    assert set(found.general) == set(GENERAL.get(name, {})), found
    for parameter, why in GENERAL.get(name, {}).items():
        assert why in found.general[parameter]
    assert set(found.tapped) | set(found.general) | set(found.unused) == {n for n, _ in model.named_parameters()}
    assert found.unused == (("body.unused",) if name == "bare parameters" else ())


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("targets", ["expected", "sampled"])
def test_taps_and_the_general_path_agree(name, targets):
    model, batch = case(name, torch.float64)
    quick, slow = (
        holdfast.diagonal_fisher(model, [batch], holdfast.categorical, targets=targets, taps=taps)
        for taps in (True, False)
    )
    errors = relative_errors(quick.entries, slow.entries)
    assert max(errors.values()) <= 1e-9, errors


SIGNED = ["layer norm", "group norm", "prelu", "weight norm", "bare parameters", "bare parameters on the left"]


@pytest.mark.parametrize("name", SIGNED)
def test_gradients_have_their_signs_which_their_squares_do_not_show(name):
    """In a dense Fisher each stands beside those of all other parameters."""
    model, batch = case(name, torch.float64)
    quick, slow = (
        holdfast.dense_fisher(model, [batch], holdfast.categorical, targets="observed", taps=taps)
        for taps in (True, False)
    )
    torch.testing.assert_close(quick.matrix, slow.matrix, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_float32_is_as_near_as_it_can_be(name):
    model, batch = case(name, torch.float32, size=9)
    exact = squares_loop(model, batch, holdfast.categorical.nll)
    fisher = holdfast.diagonal_fisher(model, [batch], holdfast.categorical, targets="observed")
    errors = relative_errors(fisher.entries, exact)
    assert max(errors.values()) <= 1e-5, errors


@pytest.mark.parametrize("name", LAYERS)
def test_under_bfloat16_autocast_sums_stay_in_float32(name):
    model, batch = case(name, torch.float32, size=32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        exact = squares_loop(model, batch, holdfast.categorical.nll)
        fisher = holdfast.diagonal_fisher(model, [batch], holdfast.categorical, targets="observed")
    errors = relative_errors(fisher.entries, exact)
    assert max(errors.values()) <= 3e-2, errors
    assert {entries.dtype for entries in fisher.entries.values()} == {torch.float32}


def test_an_lstm_is_tapped_in_float32_too():
    """Where oneDNN would do all of it in one operation."""
    model, batch = case("lstm", torch.float32)
    assert holdfast.coverage(model, [batch], holdfast.categorical).fraction == 1


@pytest.mark.parametrize("trained", [False, True])
def test_a_frozen_encoder_takes_its_fast_path_and_a_trained_one_is_tapped(trained, monkeypatch):
    """`nn.TransformerEncoder` runs as one operation in evaluation mode where nothing in it trains."""
    model = Ends(encoder(batch_first=True), (6, 8)).double()
    model.body.requires_grad_(trained)
    batch = (torch.randn(5, 6, 8, dtype=torch.float64), torch.arange(5) % CLASSES)
    fused, calls = torch._transformer_encoder_layer_fwd, []
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *args: calls.append(1) or fused(*args))
    fisher = holdfast.diagonal_fisher(model, [batch], holdfast.categorical, targets="observed")
    assert bool(calls) != trained
    errors = relative_errors(fisher.entries, squares_loop(model, batch, holdfast.categorical.nll))
    assert max(errors.values()) <= 1e-9
    assert not holdfast.coverage(model, [batch], holdfast.categorical).general


@pytest.mark.parametrize(
    "options", [{"padding_idx": 2}, {"padding_idx": 2, "sparse": True}, {"scale_grad_by_freq": True}]
)
def test_embeddings(options):
    """Rows used several times by an example, padding, sparse gradients, and frequencies (which are the batch's)."""

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(7, 4, **options), nn.Linear(4, CLASSES)

        def forward(self, ids):
            return self.head(torch.tanh(self.embed(ids)).sum(1))

    torch.manual_seed(0)
    model = Words().double()
    batch = (torch.randint(0, 7, (6, 5)), torch.arange(6) % CLASSES)
    fisher = holdfast.diagonal_fisher(model, [batch], holdfast.categorical, targets="observed")
    exact = squares_loop(model, batch, holdfast.categorical.nll)
    assert max(relative_errors(fisher.entries, exact).values()) <= 1e-9
    general = holdfast.coverage(model, [batch], holdfast.categorical).general
    assert set(general) == ({"embed.weight"} if "scale_grad_by_freq" in options else set())


def test_another_form_of_batch_gets_a_plan_of_its_own():
    model, _ = case("transformer encoder, time first", torch.float64)
    model.head = nn.Linear(8, CLASSES).double()
    forward = lambda model, batch: model.head(model.body(batch[0]).mean(1))  # noqa: E731
    batches = [
        (torch.randn(size, length, 8, dtype=torch.float64), torch.arange(size) % CLASSES)
        for size, length in [(4, 6), (4, 6), (3, 4), (1, 5), (4, 4), (2, 2), (5, 1), (6, 3)]
    ]
    fisher = holdfast.diagonal_fisher(model, batches, holdfast.categorical, targets="observed", forward=forward)
    exact = [squares_loop(model, batch, holdfast.categorical.nll, forward) for batch in batches]
    total = {name: sum(each[name] for each in exact) for name in exact[0]}
    assert max(relative_errors(fisher.entries, total).values()) <= 1e-9


def test_batches_padded_to_their_own_length_share_a_plan(monkeypatch):
    """As collators give them: another length in every batch."""
    trials = []
    monkeypatch.setattr(engine, "Trial", lambda *args: trials.append(1) or trial.Trial(*args))
    model = Ends(encoder(batch_first=True), (6, 8)).double()
    model.head = nn.Linear(8, CLASSES).double()
    forward = lambda model, batch: model.head(model.body(batch[0]).mean(1))  # noqa: E731
    batches = [(torch.randn(4, length, 8, dtype=torch.float64), torch.arange(4) % CLASSES) for length in (6, 5, 4, 9)]
    fisher = holdfast.diagonal_fisher(model, batches, holdfast.categorical, targets="observed", forward=forward)
    exact = [squares_loop(model, batch, holdfast.categorical.nll, forward) for batch in batches]
    total = {name: sum(each[name] for each in exact) for name in exact[0]}
    assert max(relative_errors(fisher.entries, total).values()) <= 1e-9
    assert len(trials) == 1


def test_a_gradient_that_is_zero_for_now_is_zero():
    """A fresh adapter: its second factor is zero, so no gradient reaches the first."""

    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up = nn.Linear(5, 2, bias=False), nn.Linear(2, CLASSES, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x):
            return (x.sum(-1, keepdim=True) + self.up(self.down(x))).mean(1)

    model = Adapted().double()
    batch = (torch.randn(5, 4, 5, dtype=torch.float64), torch.arange(5) % CLASSES)
    fisher = holdfast.diagonal_fisher(model, [batch], holdfast.categorical)
    assert not fisher.entries["down.weight"].any()
    assert fisher.entries["up.weight"].any()
    assert not holdfast.coverage(model, [batch], holdfast.categorical).general


def test_examples_that_are_nearly_all_alike_are_told_apart():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    x = torch.zeros(6, 4, dtype=torch.float64)
    x[3] = torch.randn(4)
    batch = (x, torch.tensor([0, 1, 0, 1, 0, 1]))
    fisher = holdfast.diagonal_fisher(model, [batch], holdfast.categorical, targets="observed")
    exact = squares_loop(model, batch, holdfast.categorical.nll)
    assert max(relative_errors(fisher.entries, exact).values()) <= 1e-9


class Largest(TorchDispatchMode):
    """The most entries that any tensor made inside has."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        fresh = found if isinstance(found, Tensor) and not func.is_view else torch.empty(0)
        self.entries = max(self.entries, fresh.numel())
        return found


@pytest.mark.parametrize("targets", ["observed", "expected"])
@pytest.mark.parametrize(
    ("body", "shape", "weight"),
    [
        (lambda: nn.Linear(64, 64), (64,), 64 * 64),
        (lambda: nn.Linear(64, 64), (2, 64), 64 * 64),
        (lambda: nn.Conv2d(32, 32, 3, padding=1), (32, 4, 4), 32 * 32 * 9),
        (lambda: nn.Conv2d(8, 64, 3), (8, 3, 3), 8 * 64 * 9),
        (lambda: nn.TransformerEncoderLayer(64, 2, 64, batch_first=True), (2, 64), 3 * 64 * 64),
    ],
    ids=["linear", "sequence", "wide convolution", "narrow convolution", "encoder"],
)
def test_gradients_are_never_written_out_for_a_whole_batch(body, shape, weight, targets):
    """No tensor has batch × parameter entries, nor a fifth of them."""
    model = Ends(body(), shape)
    batch = (torch.randn(300, *shape), torch.arange(300) % CLASSES)
    with Largest() as ours:
        holdfast.diagonal_fisher(model, [batch], holdfast.categorical, targets=targets, memory=1 << 18)
    assert weight <= ours.entries <= 300 * weight / 5


def test_nothing_of_a_graph_outlives_its_batch(monkeypatch):
    """A cycle would keep a batch's activations until the garbage collector comes."""
    alive, graph = [], engine.Graph

    def watched(*args):
        found = graph(*args)
        alive.append(weakref.ref(found))
        return found

    monkeypatch.setattr(engine, "Graph", watched)
    monkeypatch.setattr(trial, "Graph", watched)
    model, batch = case("transformer encoder", torch.float64)
    counts = []

    def batches():
        for _ in range(4):
            yield batch
            counts.append(sum(each() is not None for each in alive))

    gc.collect()
    gc.disable()
    try:
        holdfast.diagonal_fisher(model, batches(), holdfast.categorical)
        assert len(alive) >= 5
        assert not any(each() is not None for each in alive)
    finally:
        gc.enable()
    assert max(counts) <= 1
