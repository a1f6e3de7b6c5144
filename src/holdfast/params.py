"""Named parameters: canonical names through wrappers, aliases of tied ones, and the one comparison."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .errors import ArgumentError, InertError, MismatchError

# Patterns over names (or names) that choose parameters; None for all of them.
Only = str | Collection[str] | None

# The child through which a wrapper shows the model it wraps, by class name: the classes themselves
# live in packages that may not be installed.
_TRANSPARENT = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "AveragedModel": "module",
    "DeepSpeedEngine": "module",
    "OptimizedModule": "_orig_mod",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "PeftModel": "base_model",
    "BaseTuner": "model",
    "BaseTunerLayer": "base_layer",
    "ModulesToSaveWrapper": "modules_to_save",
}
_PEFT_LAYERS = {"BaseTunerLayer", "ModulesToSaveWrapper"}


def _hidden(path: list[nn.Module], apart: bool) -> Collection[str]:
    """The children and parameters of the last module of `path` that are a wrapper's detail, and no part of names."""
    owner = path[-1]
    # PEFT keeps `lora_A.<adapter>.weight`, and a retrained module under `modules_to_save.<adapter>`.
    adapters = isinstance(owner, (nn.ModuleDict, nn.ParameterDict)) and len(path) > 1 and not apart
    if adapters and _PEFT_LAYERS & {base.__name__ for base in type(path[-2]).__mro__}:
        return {*owner._modules, *owner._parameters}
    return _transparent_children(type(owner).__mro__)


@functools.cache
def _transparent_children(bases: tuple[type, ...]) -> frozenset[str]:
    return frozenset(_TRANSPARENT[base.__name__] for base in bases if base.__name__ in _TRANSPARENT)


def walked(model: nn.Module, *, apart: bool = False) -> list[tuple[str, nn.Module, Collection[str]]]:
    """Every module under its canonical prefix, with what it hides; shared ones as often as they are used.

    Names of adapters are hidden too, unless these are to be told `apart`.
    """
    found: list[tuple[str, nn.Module, Collection[str]]] = []
    _walk([model], "", apart, found)
    return found


def _walk(path: list[nn.Module], prefix: str, apart: bool, found: list[tuple[str, nn.Module, Collection[str]]]) -> None:
    """Add the last module of a path and all below. At every step of a hold: no generators within generators."""
    hidden = _hidden(path, apart)
    found.append((prefix, path[-1], hidden))
    for key, child in path[-1]._modules.items():
        if child is not None and child not in path:
            _walk([*path, child], prefix if key in hidden else f"{prefix}{key}.", apart, found)


def _uses(model: nn.Module, *, apart: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
    """Every name of every parameter, in the order of `named_parameters`."""
    for prefix, module, hidden in walked(model, apart=apart):
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield prefix.rstrip(".") if key in hidden else f"{prefix}{key}", parameter


def _named(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, tuple[str, ...]], list[str]]:
    """The parameters under their first name, the other names of those that are tied, and names that two have."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"a model (nn.Module) is needed, got {type(model).__name__}.")
    first: dict[int, str] = {}
    found: dict[str, nn.Parameter] = {}
    others: dict[str, tuple[str, ...]] = {}
    double: list[str] = []
    for name, parameter in _uses(model):
        if is_lazy(parameter):
            raise ArgumentError(f"`{name}` has no shape yet. Run the model once on a batch before using it here.")
        known = first.get(id(parameter))
        if known is not None:
            if name != known and name not in others.get(known, ()):
                others[known] = (*others.get(known, ()), name)
        elif name in found and found[name].requires_grad and parameter.requires_grad:
            double.append(name)
        elif name not in found or parameter.requires_grad:
            first[id(parameter)] = name
            found[name] = parameter
    return found, others, double


def all_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter, frozen ones too, by canonical name: once each, tied or not."""
    found, _, double = _named(model)
    _require_single(double)
    return found


def _require_single(double: Collection[str]) -> None:
    for name in double:
        raise MismatchError(
            f"two trainable parameters are both called `{name}` once wrappers and adapter names are "
            "stripped. Freeze the adapter that is not in use."
        )


def told_apart(model: nn.Module) -> dict[str, nn.Parameter]:
    """`all_parameters`, but of adapters that train beside each other with the adapter's own name in theirs."""
    found, _, double = _named(model)
    if not double:
        return found
    known = {id(parameter): name for name, parameter in found.items() if name not in double}
    apart = {known.get(id(parameter), name): parameter for name, parameter in _uses(model, apart=True)}
    return {name: parameter for name, parameter in apart.items() if name in found or parameter.requires_grad}


def trainable(model: nn.Module, only: Only = None) -> dict[str, nn.Parameter]:
    """The parameters that require gradients, by canonical name; of those `only` the ones that fit a pattern.

    >>> list(trainable(nn.DataParallel(nn.Linear(2, 1))))
    ['weight', 'bias']
    """
    found = {name: p for name, p in all_parameters(model).items() if p.requires_grad}
    unreal = [name for name, p in found.items() if not p.is_floating_point()]
    if unreal:
        raise ArgumentError(f"`{unreal[0]}` is complex, and only real parameters have a Fisher here. Freeze it.")
    if not found:
        raise InertError(
            f"{type(model).__name__} has no trainable parameters, so there is nothing to hold. "
            "Was it frozen with requires_grad_(False)?"
        )
    if only is None:
        return found
    part = chosen(found, only)
    if not part:
        raise ArgumentError(f"only={only!r} fits none of the trainable parameters: {some(found)}.")
    return part


def chosen(named: Mapping[str, nn.Parameter], only: str | Collection[str]) -> dict[str, nn.Parameter]:
    """The parameters whose names are among `only`, or fit a pattern of it, such as "head.*"."""
    patterns = [only] if isinstance(only, str) else list(only)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise ArgumentError(f"parameters are chosen by names or patterns over names, got {only!r}.")
    return {
        name: parameter
        for name, parameter in named.items()
        if any(name == pattern or fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }


def aliases(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """For each tied parameter, the names it has besides its canonical one."""
    return _named(model)[1]


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside data-parallel and compilation wrappers, whose own forward does more than the model's."""
    while type(model).__name__ in ("DistributedDataParallel", "DataParallel", "OptimizedModule"):
        model = getattr(model, _TRANSPARENT[type(model).__name__])
    return model


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a state dict keeps (BatchNorm's statistics), by canonical name."""
    return {
        f"{prefix}{key}": buffer
        for prefix, module, _ in walked(model)
        for key, buffer in module._buffers.items()
        if buffer is not None
        and key not in module._non_persistent_buffers_set
        and not _transparent_children(type(module).__mro__)
    }


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """The shape of each tensor."""
    return {name: tensor.shape for name, tensor in tensors.items()}


def matched(
    model: nn.Module,
    wanted: Mapping[str, torch.Size],
    *,
    ties: Mapping[str, tuple[str, ...]] | None = None,
    grown: bool = False,
) -> dict[str, nn.Parameter]:
    """The model's parameters under a memory's names: the one place where names and shapes are compared.

    `wanted` may cover fewer parameters than the model has. With `grown`, a parameter may be larger than the
    memory's in any axis. Anything else that differs raises, and names what differs.
    """
    found, others, double = _named(model)
    _require_single([name for name in double if name in wanted])
    for first, more in others.items():
        found.update(dict.fromkeys(more, found[first]))

    missing = [name for name in wanted if name not in found]
    spare = [name for name in found if name not in wanted] if missing else []
    cure = _renamed({name: wanted[name] for name in missing}, {name: found[name].shape for name in spare})
    if wanted and len(missing) == len(wanted):
        merged = " Its adapter may have been merged into the weights, which its memory does not know."
        raise InertError(
            "no parameter of the memory is in this model, so nothing would be held. "
            f"The memory has {some(wanted)}; the model has {some(found)}."
            + (merged if any(part.startswith("lora_") for name in missing for part in name.split(".")) else cure)
        )
    wrong = [f"it has {some(missing)}, which the model lacks"] if missing else []
    present = {name: (found[name].shape, want) for name, want in wanted.items() if name in found}
    differ = {name: pair for name, pair in present.items() if pair[0] != pair[1] and not (grown and contains(*pair))}
    wrong += [f"`{name}` {unlike(*pair)}" for name, pair in differ.items()]
    for name, more in (ties or {}).items():
        parted = [other for other in more if name in found and other in found and found[other] is not found[name]]
        if parted:
            wrong.append(f"`{name}` and {some(parted)} were one parameter when the memory was made and are not now")
    for first, more in others.items():
        joined = [name for name in (first, *more) if name in wanted]
        if len(joined) > 1:
            wrong.append(f"{some(joined)} were apart when the memory was made and are one parameter now")
    if wrong:
        if differ and not missing and all(contains(*pair) for pair in differ.values()):
            raise MismatchError(
                f"this memory is of another model: {'; '.join(wrong)}. If layers grew, call posterior.expanded(model) "
                "first."
            )
        raise MismatchError(
            f"this memory is of another model: {'; '.join(wrong)}. Use the model the memory was made from, or make a "
            f"new memory.{'' if differ else cure}"
        )
    return {name: found[name] for name in wanted}


def unlike(got: torch.Size, want: torch.Size) -> str:
    """How a parameter of the model differs from the memory's."""
    turned = len(got) == 2 and got == want[::-1]
    return f"has shape {tuple(got)} in the model and {tuple(want)} in the memory{', transposed' if turned else ''}"


def _renamed(missing: Mapping[str, torch.Size], spare: Mapping[str, torch.Size]) -> str:
    """A guess, where each that is missing has one of its shape that the memory does not know, in their order."""
    pairs: dict[str, str] = {}
    for name, shape in missing.items():
        alike = [other for other, size in spare.items() if size == shape and other not in pairs.values()]
        if not alike:
            return ""
        pairs[name] = alike[0]
    listed = ", ".join(f"{old!r}: {new!r}" for old, new in list(pairs.items())[:3])
    more = ", ..." if len(pairs) > 3 else ""
    return (
        f" If layers were renamed, give them their new names: posterior.renamed({{{listed}{more}}})." if pairs else ""
    )


def renaming(names: Collection[str], known: Iterable[str], ties: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """For each of `names` that `known` has under another of its tied names, that name."""
    known = set(known)
    groups = [{name, *more} for name, more in ties.items()]
    found = {}
    for name in names:
        others = {other for group in groups if name in group for other in group} & known
        if name not in known and others:
            found[name] = min(others)
    unsaid = [name for name, other in found.items() if other in names or list(found.values()).count(other) > 1]
    if unsaid:
        raise MismatchError(
            f"`{unsaid[0]}` and `{found[unsaid[0]]}` are one tied parameter in one posterior and two in the other. "
            "Make both from models that tie the same parameters."
        )
    return found


def require_shapes(got: Mapping[str, torch.Size], want: Mapping[str, torch.Size], *, what: str, than: str) -> None:
    """Raise unless everything named in `got` is in `want`, with the same shape."""
    unknown = [name for name in got if name not in want]
    if unknown:
        raise MismatchError(f"{what} has {some(unknown)}, and {than} nothing of that name.")
    for name, shape in got.items():
        other = want[name]
        if shape != other:
            grew = contains(shape, other) or contains(other, shape)
            cure = " If the layer grew, expand the older one first: posterior.expanded(model)." if grew else ""
            raise MismatchError(f"`{name}` has shape {tuple(shape)} in {what} and {tuple(other)} in {than}.{cure}")


def require_values(named: Mapping[str, Tensor]) -> None:
    """Raise where a parameter is on the meta device."""
    empty = [name for name, value in named.items() if value.is_meta]
    if empty:
        raise ArgumentError(f"{some(empty)} is on the meta device and has no values. Load the weights first.")


def contains(large: torch.Size, small: torch.Size) -> bool:
    """Whether one shape is at least as large as another in every axis."""
    return len(large) == len(small) and all(a >= b for a, b in zip(large, small, strict=True))


def some(names: Mapping[str, object] | list[str], limit: int = 6) -> str:
    """The first names, for an error."""
    listed = [f"`{name}`" for name in list(names)[:limit]]
    rest = len(names) - len(listed)
    return ", ".join(listed) + (f" and {rest} more" if rest > 0 else "") if listed else "nothing"
