"""The model under evaluation, ready to run at any of its precisions.

A nested model is opened once and switched. An ordinary checkpoint is quantized on the fly: packed into a
temporary directory, which is opened like any nested model and deleted at once, for the mapped shards live on
without a name and not even a kill leaves them behind. So its numbers are those of packing and loading by
construction, and there is no second way of quantizing to keep equal to the first. The price is disk space: 9
bits per weight, in the system's temporary directory (set TMPDIR to choose another). Either way memory holds
the weights decoded to one precision at a time (`evaluate.decoded`).

A checkpoint is quantized as it was tuned, or as asked for (`file.coding`); a nested model is what it is.

The full precision of a checkpoint, `fp`, is the checkpoint itself, opened when it is asked for and let go
when told to. A nested model has none, but may be given the checkpoint it is to be compared with, of the same
vocabulary: that one's then.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from otaro.errors import CheckpointError, OtaroError, PrecisionError
from otaro.evaluate.decoded import DecodedModel
from otaro.evaluate.progress import Progress
from otaro.evaluate.quality import in_order
from otaro.evaluate.records import FULL, PRECISION_NAMES
from otaro.file.checkpoint import HUB, brief, resolve_model, resolve_nested
from otaro.file.coding import Coding, choose_coding
from otaro.file.fits import Fit, finest_of, fit_name, is_fit, known
from otaro.file.header import BASE, shard_name
from otaro.file.hub import Hub
from otaro.file.io import NestedDirectory
from otaro.file.pack import pack
from otaro.runtime.load import check_device, load, load_tokenizer
from otaro.runtime.precision import set_precision
from otaro.sefp.codec import Reconstruction
from otaro.sefp.precision import FINEST, Precision

ALL = "all"
_READ_SIZE = 1 << 22


def parse_precisions(text: str) -> list[str] | None:
    """`fp,E5M8,E5M3` as names, full precision first, then from fine to coarse, then fits; None for `all`."""
    names = [name.strip() for name in text.split(",")]
    if names == [ALL]:
        return None
    exact = {name.upper(): name for name in PRECISION_NAMES}
    if any(name.upper() not in exact and not is_fit(name) for name in names):
        raise PrecisionError(
            f"--precision {text}: give all, or some of {', '.join(PRECISION_NAMES)}, or fits such as fit:90MB"
        )
    return in_order(fit_name(name) if is_fit(name) else exact[name.upper()] for name in names)


class Subject:
    """A nested model (directory or Hub id), or a checkpoint (also `builtin`), at some of its `precisions`.

    >>> subject = Subject("my-model-sefp", "E5M8,E5M3")                      # doctest: +SKIP
    >>> subject.at("E5M3").generate(...)                                     # doctest: +SKIP
    """

    def __init__(
        self,
        model: str,
        precision: str = ALL,
        *,
        device: str = "cpu",
        with_reference: bool = False,
        group_size: int | None = None,
        reconstruction: Reconstruction | None = None,
        original: str | None = None,
        hub: Hub = HUB,
    ) -> None:
        """`original` is the checkpoint that a nested model is compared with."""
        check_device(device)
        self.model, self.device, self.revision = model, device, hub.revision
        self.is_directory = Path(model).is_dir()
        self.fits: dict[str, Fit] = {}
        """Those among the precisions."""
        self.coding_asked = group_size is not None or reconstruction is not None
        wanted = parse_precisions(precision)
        self.path = resolve_model(model, ["config.json"], hub)
        self.is_nested = _is_nested(self.path)
        if self.is_nested:
            named = [Precision(name) for name in wanted or () if name != FULL and not is_fit(name)]
            every = not named or with_reference or any(map(is_fit, wanted or ()))
            nested = NestedDirectory(resolve_nested(model, None if every else max(named), hub))
            self.path = nested.path
            self.coding = Coding(nested.schema.group_size, nested.schema.reconstruction)
            for flag, asked, there in (
                ("--group-size", group_size, self.coding.group_size),
                ("--reconstruction", reconstruction, self.coding.reconstruction),
            ):
                if asked not in (None, there):
                    packed = f"{model} is packed in {self.coding}"
                    raise OtaroError(f"{flag} {asked}: {packed}; pack its checkpoint anew")
            self.reference = str(nested.finest) if original is None else FULL
            present = [name for name in PRECISION_NAMES[1:] if Precision(name) <= nested.finest]
            self.precisions = ([FULL] if original is not None else []) + present if wanted is None else wanted
            if FULL in self.precisions and original is None:
                raise PrecisionError(
                    f"{model} is a nested model, which has no {FULL}; evaluate the checkpoint it was packed "
                    "from, or name that with --reference"
                )
            chosen = {name: known(nested, name) for name in self.precisions if name != FULL}
            self._finest = max(map(finest_of, chosen.values()), default=nested.finest)
            nested.require(self._finest)
            self.fits = {name: one for name, one in chosen.items() if isinstance(one, Fit)}
        else:
            if fits := [name for name in wanted or () if is_fit(name)]:
                nested_only = f"{fits[0]} is of a nested model"
                raise PrecisionError(f"{nested_only}, and {model} is a checkpoint: pack it, then fit")
            if original is not None:
                its_own = f"{model} is a checkpoint, which has its own {FULL}"
                raise OtaroError(f"--reference is for nested models; {its_own}")
            self.path = resolve_model(model, hub=hub)
            self.coding = choose_coding(self.path, group_size, reconstruction)
            self.reference = FULL
            self.precisions = list(PRECISION_NAMES) if wanted is None else wanted
        self.config = _read_config(self.path)
        elsewhere = replace(hub, revision=None)  # which is that of the nested model
        self.original = None if original is None else Subject(original, device=device, hub=elsewhere)
        if self.original is not None:
            self._check_original(self.original)
        self._full: Any = None
        self.packed: Any = None
        """The nested model, once it is open."""
        self._decoded: DecodedModel | None = None

    def _check_original(self, original: Subject) -> None:
        """Refuse to compare predictions of different tokens."""
        if original.is_nested:
            raise OtaroError(f"--reference {original.model} is a nested model; give an ordinary checkpoint")
        sizes = [one.config.get_text_config().vocab_size for one in (self, original)]
        if sizes[0] != sizes[1] or self.tokenizer.get_vocab() != original.tokenizer.get_vocab():
            raise OtaroError(
                f"--reference {original.model} has another vocabulary or tokenizer than {self.model}: "
                "their predictions cannot be compared"
            )

    @cached_property
    def identity(self) -> str:
        """What a record knows it by: a nested model's identity, or the SHA-256 of a checkpoint's files."""
        if self.is_nested:
            return NestedDirectory(self.path).base.header.model
        digest = hashlib.sha256()
        for path in [self.path / "config.json", *sorted(self.path.glob("*.safetensors"))]:
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            with path.open("rb") as file:
                while some := file.read(_READ_SIZE):
                    digest.update(some)
        return digest.hexdigest()

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return load_tokenizer(self.path)

    def at(self, precision: str, progress: Progress = lambda what, done, total: None) -> Any:
        """An ordinary model at this precision, until the next call; `progress` is that of packing."""
        if precision == FULL and self.original is not None:
            return self.original.at(FULL)
        if precision == FULL:
            if self._full is None:
                self._full = self._open_full()
            return self._full
        if self._decoded is None:
            self._decoded = DecodedModel(self._opened(progress))
        return self._decoded.at(self.fits[precision].precisions if precision in self.fits else precision)

    def packed_at(self, precision: str, progress: Progress = lambda what, done, total: None) -> Any:
        """The nested model, to be run at this precision until the next call."""
        set_precision(self._opened(progress), self.fits.get(precision, precision))
        return self.packed

    def _opened(self, progress: Progress) -> Any:
        if self.packed is None and self.is_nested:
            self.packed = load(self.path, self._finest, device=self.device)
        elif self.packed is None:
            with tempfile.TemporaryDirectory(prefix="otaro-eval-") as directory:
                nested = Path(directory) / "nested"
                pack(self.path, nested, **asdict(self.coding), progress=progress)
                self.packed = load(nested, device=self.device)  # at its finest: every shard is mapped now
        return self.packed

    def release_full(self) -> None:
        """Let go of the unquantized model."""
        self._full = None
        if self.original is not None:
            self.original.release_full()

    def _open_full(self) -> Any:
        from transformers import AutoModelForCausalLM

        place = torch.device(self.device)
        dtype = torch.float32 if place.type == "cpu" else (self.config.dtype or torch.float16)
        safely = {"use_safetensors": True, "trust_remote_code": False, "output_loading_info": True}
        try:
            model, found = AutoModelForCausalLM.from_pretrained(
                self.path, dtype=dtype, device_map={"": place}, **safely
            )
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever is wrong with the checkpoint
            raise CheckpointError(f"transformers cannot open {self.path}: {brief(error)}") from error
        if missing := found["missing_keys"]:
            lacking = f"the tensor {min(missing)}, which {self.config.model_type} models need"
            raise CheckpointError(f"{self.path} lacks {lacking}")
        return model.eval()


def _is_nested(path: Path) -> bool:
    if any((path / shard_name(plane)).is_file() for plane in range(BASE, FINEST + 1)):
        return True
    try:
        stated = json.loads((path / "config.json").read_text())
        return bool(stated["quantization_config"]["quant_method"] == "sefp")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _read_config(path: Path) -> Any:
    from transformers import AutoConfig

    if not (path / "config.json").is_file():
        wanted = "the directory of a nested model or of a Hugging Face model"
        raise CheckpointError(f"{path} has no config.json; give {wanted}")
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # whatever a strange config makes transformers stumble over
        unknown = f"{path}: config.json describes no model that transformers knows"
        raise CheckpointError(f"{unknown}: {brief(error)}") from error
