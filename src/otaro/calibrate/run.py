"""`otaro pack MODEL OUT --calibrate TEXT`: a model packed with codes that were chosen on real activations.

Layer by layer: read its weights, run all windows through it, add up the Gram matrix of every matrix's inputs,
fold channel scales, choose codes, write them to the work folder. The activations are those of the
full-precision model: it is the one model that is the same for all six precisions. Then the usual writer
writes the nested directory, with these codes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from otaro.calibrate import codes, folds, layers, text
from otaro.calibrate.layers import Inputs, Matrix, Skeleton, Watch
from otaro.calibrate.work import Tensor, Work
from otaro.errors import OtaroError
from otaro.file.atomic import alone, check_place, explained
from otaro.file.checkpoint import Checkpoint, resolve_model
from otaro.file.coding import Coding, choose_coding
from otaro.file.gguf import is_gguf
from otaro.file.gguf_tokenizer import write_tokenizer
from otaro.file.hub import Hub
from otaro.file.io import NestedDirectory
from otaro.file.pack import check_target, pack
from otaro.packable import Kind
from otaro.runtime.load import check_device
from otaro.sefp.codec import Reconstruction, SefpTensor, encode, group_needs, smallest_scale_exponent

SAMPLES = 128
"""Windows of text, by default."""
TIED = 0.1
"""What a tied table's rows count as embedding beside what they do as head, over the mean of the head's H."""

_WINDOWS_ON_CPU, _WINDOWS_ELSEWHERE = 4, 16  # that run together
_HEAD_ROWS_ON_CPU, _HEAD_ROWS_ELSEWHERE = 4096, 32768

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Calibrated:
    """What came of it."""

    nested: NestedDirectory
    tokens: int
    plain: list[str]
    """What could not be calibrated and is packed plainly, with the reason."""


def pack_calibrated(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    content: str | torch.Tensor,
    *,
    text_name: str = "text",
    samples: int = SAMPLES,
    device: str | torch.device = "cpu",
    group_size: int | None = None,
    reconstruction: Reconstruction | None = None,
    overwrite: bool = False,
    keep_float32: bool = False,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress = lambda name, done, total: None,
) -> Calibrated:
    """`otaro.pack` with codes that make up for each other's error on the text `content`; the file's format is
    the same.

    At most `samples` windows of 512 tokens are used, spread evenly over the text; where `content` is a
    tensor, it is the windows themselves, token ids [windows, tokens]. Finished layers are kept in a hidden
    folder beside `out` until the model is complete: the same call goes on after the last of them.
    """
    check_device(device)
    source = Path(model) if is_gguf(model) else resolve_model(model, hub=Hub(revision, token, cache_dir))
    coding = choose_coding(source, group_size, reconstruction)
    if coding.reconstruction != "midpoint":
        raise OtaroError(
            "--calibrate chooses codes that stand for midpoints; leave out --reconstruction truncate, or "
            "--calibrate"
        )
    if samples < 1:
        raise OtaroError(f"at least one window of text is needed to calibrate on, got {samples}")
    target = Path(os.path.realpath(out))
    check_target(target, source, overwrite)
    with explained(target):
        check_place(target, overwrite)
    checkpoint = Checkpoint(source)
    folder = target.parent / f".{target.name}.calibrating"
    with alone(folder):
        ids = _windows(checkpoint, content, samples) if isinstance(content, str) else content.long()
        _check(ids, checkpoint)
        seen = content.encode() if isinstance(content, str) else ids.contiguous().numpy().tobytes()
        record = {"text": text_name, "sha256": hashlib.sha256(seen).hexdigest(), "windows": list(ids.shape)}
        work = Work(folder, _digest(source, coding, record))
        try:
            with torch.inference_mode():
                _Calibration(checkpoint, coding, torch.device(device), ids, work, progress).run()
        except BaseException:
            work.remove_unless_worth_keeping()
            raise
        plain = work.plain
        weights = sum(map(prod, checkpoint.packed.values()))
        progress("packing", weights, weights)
        nested = pack(
            source,
            target,
            group_size=coding.group_size,
            reconstruction=coding.reconstruction,
            overwrite=overwrite,
            keep_float32=keep_float32,
            chosen=work,
            record={"calibrated": record},
        )
        work.remove()
    return Calibrated(nested, ids.numel(), plain)


def _tokenizer(checkpoint: Checkpoint) -> Any:
    if checkpoint.gguf is None:
        return text.load_tokenizer(checkpoint.directory)
    with TemporaryDirectory() as folder:
        if why := write_tokenizer(
            checkpoint.gguf.fields, Path(folder), checkpoint.config.max_position_embeddings
        ):
            raise OtaroError(
                f"{checkpoint.directory} holds no tokenizer to read the text with: {why}; pack without "
                "--calibrate"
            )
        return text.load_tokenizer(Path(folder))


def _windows(checkpoint: Checkpoint, content: str, samples: int) -> torch.Tensor:
    tokenizer = _tokenizer(checkpoint)
    positions = getattr(checkpoint.config.get_text_config(), "max_position_embeddings", None) or text.LENGTH
    return text.windows(content, tokenizer, samples, min(text.LENGTH, positions))


def _check(ids: torch.Tensor, checkpoint: Checkpoint) -> None:
    least = min(shape[-1] for shape in checkpoint.packed.values())
    if ids.numel() < least:
        raise OtaroError(
            f"{ids.numel()} tokens are too few to calibrate on: the model's matrices have "
            f"{least} inputs and more"
        )
    rows = max(checkpoint.packed[name][0] for name in checkpoint.packed)  # no less than the vocabulary
    if int(ids.max()) >= rows:
        raise OtaroError(
            f"the tokenizer of {checkpoint.directory} makes tokens that the model lacks; it belongs to "
            "another model"
        )


def _digest(source: Path, coding: Coding, record: Mapping[str, Any]) -> str:
    """Of what decides the codes; files of weights by name, size and time of change."""
    files = [source] if source.is_file() else sorted([*source.glob("*.safetensors"), *source.glob("*.json")])
    seen = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    settings = (layers.FIRST_TOKEN, codes.LAMBDAS, codes.DAMPING, folds.EXPONENTS, TIED, coding.group_size)
    return hashlib.sha256(json.dumps([seen, settings, record]).encode()).hexdigest()


class _Calibration:
    """One run: its model, its windows, and how far it is."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        coding: Coding,
        device: torch.device,
        ids: torch.Tensor,
        work: Work,
        progress: Progress,
    ) -> None:
        self._checkpoint, self._group_size, self._device = checkpoint, coding.group_size, device
        self._ids, self._work, self._progress = ids, work, progress
        on_cpu = device.type == "cpu"
        self._batch = _WINDOWS_ON_CPU if on_cpu else _WINDOWS_ELSEWHERE
        self._head_rows = _HEAD_ROWS_ON_CPU if on_cpu else _HEAD_ROWS_ELSEWHERE
        self._skeleton = Skeleton(checkpoint, device)
        self._total = sum(map(prod, checkpoint.packed.values()))
        self._done = 0

    def run(self) -> None:
        """All layers that are not done yet, then the head."""
        skeleton, work = self._skeleton, self._work
        states = skeleton.start(self._ids, self._batch)
        work.begin(states)
        shape, layers = states.shape, len(skeleton)
        del states
        for number in range(layers):
            names = {f"{skeleton.prefix}.{number}.{name}" for name in skeleton.matrices(number)}
            if number >= work.done:
                self._progress(f"layer {number + 1} of {layers}", self._done, self._total)
                self._layer(number, work.states(number, shape), work.states(number + 1, shape))
            self._done += sum(prod(self._checkpoint.packed[name]) for name in names)
        if work.done == layers:
            self._progress("head", self._done, self._total)
            self._head(work.states(layers, shape))

    def _layer(self, number: int, before: torch.Tensor, after: torch.Tensor) -> None:
        skeleton = self._skeleton
        prefix, kinds = f"{skeleton.prefix}.{number}.", skeleton.matrices(number)
        with skeleton.layer(number) as layer:
            weights = {name: parameter.data for name, parameter in layer.named_parameters()}
            with Watch(weights, kinds) as watch:
                for first in range(0, len(before), self._batch):
                    some = slice(first, first + self._batch)
                    after[some] = skeleton.run(layer, number, before[some])
            zeros = {name: weights[name].numel() - int(weights[name].count_nonzero()) for name in kinds}
            changed = self._fold(prefix, weights, watch.inputs)
            as_packed = {
                name: weights[name].T if kind is Kind.CONV1D else weights[name]
                for name, kind in kinds.items()
            }
            tensors, plain = self._encode(prefix, as_packed, watch.inputs)
        self._work.finish(
            {prefix + name: Tensor(tensor, zeros[name]) for name, tensor in tensors.items()},
            {prefix + name: tensor for name, tensor in changed.items()},
            plain,
            after,
        )

    def _fold(
        self, prefix: str, weights: dict[str, torch.Tensor], inputs: Mapping[Matrix, Inputs]
    ) -> dict[str, torch.Tensor]:
        """Fold channel scales where all readers have the same inputs; returns the norms that changed."""
        changed = {}
        for fold in folds.folds(self._checkpoint.config, weights):
            read = [inputs.get(Matrix(name)) for name in fold.readers]
            own = read[0]
            if (
                own is None
                or any(one is not own for one in read)
                or len(own.readers) != len(read)
                or _too_few(own)
            ):
                continue
            dtype = torch.float32 if fold.norm is None else self._checkpoint.stored_dtype(prefix + fold.norm)
            own.gram = folds.apply(fold, weights, own.gram, dtype, self._group_size)
            if fold.norm is not None:
                changed[fold.norm] = weights[fold.norm].to(dtype).cpu()
        return changed

    def _encode(
        self, prefix: str, weights: Mapping[str, torch.Tensor], inputs: Mapping[Matrix, Inputs]
    ) -> tuple[dict[str, SefpTensor], list[str]]:
        """Codes of all matrices of a layer; those without inputs enough are rounded plainly, and named."""
        plainly = {
            name: encode(weight, self._group_size, name=prefix + name) for name, weight in weights.items()
        }
        enough = {id(own): own for own in inputs.values() if not _too_few(own)}
        for own in enough.values():
            errors = codes.Errors(own.gram)
            parts = [_at(weights[matrix.name], matrix) for matrix in own.readers]
            scales = [_at(plainly[matrix.name].scales, matrix) for matrix in own.readers]
            chosen = codes.compensated(torch.cat(parts), torch.cat(scales), self._group_size, errors)
            for matrix, some in zip(own.readers, chosen.split([len(part) for part in parts]), strict=True):
                _at(plainly[matrix.name].finest_codes, matrix).copy_(some)
        plain = []
        for name, weight in weights.items():
            stack = weight.dim() > 2
            matrices = [Matrix(name, expert) for expert in range(len(weight))] if stack else [Matrix(name)]
            few = [one for one in matrices if one not in inputs or _too_few(inputs[one])]
            if few:
                which = f" ({len(few)} of {len(matrices)} experts)" if stack else ""
                plain.append(
                    f"{prefix}{name}{which}: it reads fewer tokens than it has inputs ({weight.shape[-1]})"
                )
        return {name: _on_cpu(tensor) for name, tensor in plainly.items()}, plain

    def _head(self, states: torch.Tensor) -> None:
        """The head, whose inputs are those of the last norm; as embedding, rows of a tied one count alike."""
        skeleton, checkpoint = self._skeleton, self._checkpoint
        embedding = next((name for name, one in skeleton.rule.items() if one.kind is Kind.EMBEDDING), None)
        name, plain = skeleton.head, []
        if embedding is not None and name != embedding:
            plain.append(f"{embedding}: an embedding, whose rows are not multiplied with anything")
        if name is None or name not in checkpoint.packed:
            self._work.finish({}, {}, plain)
            return
        own = Inputs(checkpoint.packed[name][-1], self._device)
        for first in range(0, len(states), self._batch):
            own.add(skeleton.before_head(states[first : first + self._batch]))
        if name == embedding:
            own.gram.diagonal().add_(TIED * own.gram.diagonal().mean())
        errors = codes.Errors(own.gram)
        exponent = max(
            smallest_scale_exponent(group_needs(rows, self._group_size, "midpoint"))
            for rows in checkpoint.rows(name, self._head_rows)
        )
        parts, zeros = [], 0
        for rows in checkpoint.rows(name, self._head_rows):
            weight = rows.float().to(self._device)
            zeros += weight.numel() - int(weight.count_nonzero())
            tensor = encode(weight, self._group_size, scale_exponent=exponent, name=name)
            tensor.finest_codes.copy_(codes.compensated(weight, tensor.scales, self._group_size, errors))
            parts.append(_on_cpu(tensor))
            self._done += weight.numel()
            self._progress("head", self._done, self._total)
        bytes_, finest = (
            torch.cat([part.scale_bytes for part in parts]),
            torch.cat([part.finest_codes for part in parts]),
        )
        whole = SefpTensor(bytes_, exponent, finest, self._group_size, "midpoint")
        self._work.finish({name: Tensor(whole, zeros)}, {}, plain)


def _too_few(inputs: Inputs) -> bool:
    return inputs.count < len(inputs.gram)


def _at(tensor: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    return tensor if matrix.expert is None else tensor[matrix.expert]


def _on_cpu(tensor: SefpTensor) -> SefpTensor:
    moved = tensor.scale_bytes.cpu(), tensor.scale_exponent, tensor.finest_codes.cpu()
    return SefpTensor(*moved, tensor.group_size, tensor.reconstruction)
