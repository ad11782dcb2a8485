"""Weights that stay packed in memory: which of a checkpoint's may, and their bytes in the layout of the kernels.

E experts, N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from evalengine.engine.load import unpacking
from evalengine.engine.load.shards import DTYPES, StoredTensor, read_parts
from evalengine.engine.load.weights import dummy_rows
from evalengine.kernels.packed_rows import GROUPS, PackedForm, PackedRows, unpacked_by_torch
from evalengine.layers.base import CheckpointTensor, Layer
from evalengine.layers.experts import ExpertDown, ExpertGateUp
from evalengine.layers.linear import MergedLinear, OutputLinear
from evalengine.layers.ops import Ops
from evalengine.models.packing import DUMMY_MXFP4
from evalengine.models.spec import ModelSpec
from evalengine.models.weight_names import WeightNames

MXFP4 = PackedForm("e2m1", unpacking.MXFP4_ROW, torch.uint8)
_TRANSPOSED = "mxfp4"  # the method whose weights, as its checkpoints' code has them, have inputs before outputs


@dataclass(frozen=True)
class PackedWeights:
    """forms: of the decoder's weights that stay packed. files: the files' tensors that have them, by their names."""

    forms: Mapping[str, PackedForm]
    files: Mapping[str, StoredTensor]

    def saved_bytes(self, tensors: list[CheckpointTensor], dtype: torch.dtype, ranks: int) -> int:
        """How much less memory they take than unpacked ones, all ranks together; each has room for one unpacked layer.

        tensors: those that the model needs, of one rank, on any device.
        """
        own = [tensor for tensor in tensors if tensor.name in self.forms]
        room = max((tensor.param.numel() for tensor in own), default=0) * dtype.itemsize
        saved = -ranks * room
        for tensor in own:
            n, k = tensor.shape
            saved += n * (k * dtype.itemsize - self.forms[tensor.name].row_bytes(k))
        return saved


def select_packed(
    spec: ModelSpec, names: WeightNames, stored: Mapping[str, StoredTensor], tensors: list[CheckpointTensor]
) -> PackedWeights:
    """The weights of layers all of whose weights are packed in one form that the kernels read.

    tensors: those that the model needs, on any device.
    """
    pieces = {
        name: [own for own, _ in names.pieces(spec, name, torch.empty(header.shape, device="meta"))]
        for name, header in stored.items()
    }
    forms = {own: form for name, header in stored.items() if (form := _form(header)) for own in pieces[name]}
    weights: dict[Layer, list[str]] = {}
    for tensor in tensors:
        if tensor.name.endswith(".weight"):
            weights.setdefault(tensor.layer, []).append(tensor.name)
    for layer, own in weights.items():
        found = {forms.get(name) for name in own}
        if len(found) > 1 or not _may_keep(layer):
            for name in own:
                forms.pop(name, None)
    files = {name: header for name, header in stored.items() if {*pieces[name]} & forms.keys()}
    whole = {own for name in files for own in pieces[name]}
    if whole != forms.keys():  # a file's tensor that stays packed only in part
        return PackedWeights({}, {})
    return PackedWeights(forms, files)


def allocate(model: nn.Module, tensors: list[CheckpointTensor], packed: PackedWeights, ops: Ops) -> None:
    """Storage for a model that was made without: packed for the weights that stay packed, else as `ops` has it."""
    forms = {tensor.layer: packed.forms[tensor.name] for tensor in tensors if tensor.name in packed.forms}
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            if not parameter.is_meta:
                continue
            if name == "weight" and isinstance(module, Layer) and module in forms:
                module.packed = PackedRows.empty(forms[module], parameter.shape, ops.device)
                continue
            if id(parameter) not in made:
                storage = torch.empty_like(parameter, device=ops.device)
                made[id(parameter)] = nn.Parameter(storage, requires_grad=False)
            setattr(module, name, made[id(parameter)])


def load_packed(
    spec: ModelSpec, names: WeightNames, packed: PackedWeights, targets: Mapping[str, CheckpointTensor]
) -> None:
    """Fills the packed layers, each file's tensor by the rows that its pieces have of it."""
    for name, header in packed.files.items():
        rows = in_layout(header)
        count = rows.codes.shape[0]
        if header.method == _TRANSPOSED:
            numbered = torch.arange(count).view(header.shape[0], 1, -1).expand(header.shape)
        else:
            numbered = torch.arange(count).view(*header.shape[:-1], 1).expand(header.shape)
        for own, piece in names.pieces(spec, name, numbered):
            _load(targets[own], [part[piece[:, 0]] for part in rows.tensors])


def dummy_forms(spec: ModelSpec, tensors: list[CheckpointTensor]) -> dict[str, PackedForm]:
    """The dummy weights that are made packed, as config.json has them: gpt-oss's experts."""
    if spec.packing != DUMMY_MXFP4:
        return {}
    experts = [tensor for tensor in tensors if isinstance(tensor.layer, ExpertGateUp | ExpertDown)]
    return {x.name: MXFP4 for x in experts if x.name.endswith(".weight") and x.shape[1] % MXFP4.group == 0}


def load_dummies(
    forms: Mapping[str, PackedForm], targets: Mapping[str, CheckpointTensor], device: torch.device
) -> None:
    """Fills layers, packed or not, with packed dummy weights: at every level the same numbers."""
    for name, form in forms.items():
        target, rows = targets[name], dummy_rows(name, targets[name].shape, form, device)
        if target.layer.packed is None:
            target.layer.weight_loader(target.param, unpacked_by_torch(rows), target.shard)
        else:
            _load(target, rows.tensors)


def _load(target: CheckpointTensor, parts: Iterable[Tensor]) -> None:
    """Fills a checkpoint layer's rows of a packed layer with what `PackedRows.tensors` has of them."""
    assert target.layer.packed is not None
    for storage, part in zip(target.layer.packed.tensors, parts, strict=True):
        target.layer.weight_loader(storage, part, target.shard)  # type: ignore[arg-type]


def in_layout(stored: StoredTensor) -> PackedRows:
    """A packed weight's bytes, its leading dimensions one, [E N, ...]."""
    form = _form(stored)
    assert form is not None and stored.method is not None
    codes, scales, zeros = _LAYOUTS[stored.method](*read_parts(stored), *stored.sizes)
    width = form.columns(_inputs(stored))
    parts = [codes.reshape(-1, width[0]), scales.reshape(-1, width[1]), None]
    if zeros is not None:
        parts[2] = zeros.to(torch.int16).expand(scales.shape).reshape(-1, width[1])
    assert parts[0] is not None and parts[1] is not None
    return PackedRows(parts[0], parts[1], parts[2], form)


def _may_keep(layer: Layer) -> bool:
    if isinstance(layer, MergedLinear | ExpertGateUp):
        return True
    return isinstance(layer, OutputLinear | ExpertDown) and layer.by_rows


def _inputs(stored: StoredTensor) -> int:
    """K of a weight, which `_TRANSPOSED` has in another place."""
    return stored.shape[1] if stored.method == _TRANSPOSED else stored.shape[-1]


def _form(stored: StoredTensor) -> PackedForm | None:
    """How the kernels have a weight; None for one that they do not read."""
    if stored.method is None:
        return None
    k = _inputs(stored)
    form = _described(stored, k)
    if form is None or k % 32 or (form.group and (form.group not in GROUPS or k % form.group)):
        return None
    return form


def _described(stored: StoredTensor, k: int) -> PackedForm | None:
    first = stored.others[0]
    assert first is not None
    match stored.method:
        case "mxfp4" | "mxfp4_rows":
            return MXFP4
        case "nvfp4":
            return PackedForm("e2m1", unpacking.NVFP4_ROW, torch.float32)
        case "scaled":
            kind = "e4m3" if stored.packing.startswith("fp8") else "int8"
            return PackedForm(kind, stored.sizes[1] if stored.sizes[1] < k else 0, _scale_dtype(first))  # type: ignore[arg-type]
        case "awq":
            scales = stored.others[1]
            assert scales is not None
            return PackedForm("int4", stored.sizes[0] if stored.sizes[0] < k else 0, _scale_dtype(scales))
    scales, group_of = (first, stored.others[2]) if stored.method == "integers" else stored.others[1:3]
    assert scales is not None
    groups = scales.shape[1 if stored.method == "integers" else 0]
    if k % groups or (group_of is not None and not _in_order(group_of, k // groups)):
        return None
    kind = "int4" if stored.sizes[0] == 4 else "int8"
    return PackedForm(kind, k // groups if groups > 1 else 0, _scale_dtype(scales))  # type: ignore[arg-type]


def _scale_dtype(scales: StoredTensor) -> torch.dtype:
    return torch.uint8 if scales.dtype == "F8_E8M0" else DTYPES[scales.dtype]


def _in_order(group_of: StoredTensor, size: int) -> bool:
    """Whether inputs are grouped in their order, or the groups are not used (-1 everywhere)."""
    (values,) = read_parts(group_of)
    assert values is not None
    return bool((values == -1).all() or torch.equal(values.long(), torch.arange(len(values)) // size))


_Parts = tuple[Tensor, Tensor, Tensor | None]  # codes, scales, zeros


def _mxfp4(blocks: Tensor, scales: Tensor) -> _Parts:
    return blocks, scales, None


def _nvfp4(words: Tensor, scales: Tensor, of_all: Tensor, divides: int) -> _Parts:
    return words, unpacking.nvfp4_scales(scales, of_all, divides), None


def _scaled(weight: Tensor, scales: Tensor, zeros: Tensor | None, rows: int, columns: int) -> _Parts:
    *leading, n, k = weight.shape

    def of_rows(x: Tensor) -> Tensor:
        x = x.reshape(*leading, -(-n // rows), -(-k // columns))
        return x.repeat_interleave(rows, -2)[..., :n, :] if rows < n else x.expand(*leading, n, x.shape[-1])

    own = of_rows(scales.view(torch.uint8) if scales.dtype == torch.float8_e8m0fnu else scales)
    if weight.dtype == torch.float8_e4m3fn:
        return weight.view(torch.uint8), own, None
    half = torch.full((1,), 128, dtype=torch.int16)
    return (weight.short() + 128).to(torch.uint8), own, half if zeros is None else of_rows(zeros.short() + 128)


def _integers(words: Tensor, scales: Tensor, zeros: Tensor | None, _: Tensor | None, bits: int) -> _Parts:
    if zeros is None:
        return words.view(torch.uint8), scales, torch.full((1,), 1 << (bits - 1))
    return words.view(torch.uint8), scales, unpacking.from_words(zeros, bits, 0)[: len(words)]


def _gptq(qweight: Tensor, qzeros: Tensor, scales: Tensor, _: Tensor, bits: int, zero_offset: int) -> _Parts:
    zeros = unpacking.from_words(qzeros, bits, 1).add_(zero_offset)
    return _bytes(unpacking.from_words(qweight, bits, 0).t(), bits), scales.t(), zeros.t()


def _awq(qweight: Tensor, qzeros: Tensor, scales: Tensor, group_size: int) -> _Parts:
    numbers, zeros = (unpacking.awq_numbers(x) for x in (qweight, qzeros))
    return _bytes(numbers.t(), 4), scales.t(), zeros.t()


def _bytes(numbers: Tensor, bits: int) -> Tensor:
    """Integers [N, K] as bytes, of 4 bits two in each."""
    return (numbers[:, ::2] | numbers[:, 1::2] << 4 if bits == 4 else numbers).to(torch.uint8)


_LAYOUTS: Mapping[str, Callable[..., _Parts]] = {
    "mxfp4": _mxfp4,
    "mxfp4_rows": _mxfp4,
    "nvfp4": _nvfp4,
    "scaled": _scaled,
    "integers": _integers,
    "gptq": _gptq,
    "awq": _awq,
}
