"""The end of a tuning run: its checkpoint as a nested directory.

Plainly, each weight is rounded by itself, as it was in every step. Or codes are chosen on the data that were
tuned on (`otaro.calibrate`), which helps most where little was tuned at low precisions. Held-out data say
which is kept. The plain one is there before the other is tried, so that whatever stops this leaves a whole
run behind.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from otaro.cli import console
from otaro.errors import OtaroError, brief

if TYPE_CHECKING:
    import torch

    from otaro.cli.tune_heldout import HeldOut
    from otaro.tune.config import Options

Judgement = dict[str, Any]


def pack_plainly(out: Path, options: Options) -> None:
    """OUT/model as OUT/nested."""
    from otaro.runtime.pack import pack

    with console.progress_bar("packing (million weights)", 1_000_000) as progress:
        settings: dict[str, Any] = {
            "group_size": options.group_size,
            "reconstruction": options.reconstruction,
        }
        pack(out / "model", out / "nested", overwrite=True, progress=progress, **settings)


def calibrate(
    out: Path,
    model: Any,
    options: Options,
    windows: torch.Tensor,
    data: str,
    held_out: HeldOut,
    plain: Mapping[str, float],
) -> tuple[Judgement, dict[str, float]] | None:
    """Pack OUT/model on `windows` of its data, in place of OUT/nested if it has less held-out loss than
    `plain`.

    Returns what was decided, and its losses by precision; None where it could not be done, which is then
    said. `model` is the tuned one: it is given the weights of each precision in turn, and is of no use
    afterwards.
    """
    import torch

    from otaro.calibrate.run import pack_calibrated
    from otaro.export.source import Source
    from otaro.file.atomic import new_directory
    from otaro.file.io import NestedDirectory
    from otaro.file.pack import REPLACED
    from otaro.file.replace import carry_over
    from otaro.runtime.decoder_file import write_decoder_file
    from otaro.sefp.precision import PRECISIONS

    device = model.device
    scratch = out / ".calibrated.partial"
    packed = scratch / "nested"
    if scratch.exists():
        console.remark("--calibrate: was cut off before, and begins again")
        shutil.rmtree(scratch, ignore_errors=True)
    try:
        with console.progress_bar("calibrating (million weights)", 1_000_000) as progress:
            model.cpu()  # the room is for the layer at work
            name = Path(data).name if Path(data).exists() else data
            settings: dict[str, Any] = {
                "group_size": options.group_size,
                "text_name": name,
                "progress": progress,
            }
            settings["device"] = "cuda" if device.type == "cuda" else "cpu"
            pack_calibrated(out / "model", packed, windows, **settings)
        model.to(device)
        losses = {}
        with console.progress_bar("judging the calibrated codes (precisions)") as progress:
            for number, precision in enumerate(PRECISIONS):
                progress(str(precision), number, len(PRECISIONS))
                Source(packed, precision).load_into(model)
                losses[str(precision)] = held_out.loss(model)
        judged = [str(precision) for precision in options.tuned_for if precision is not None] or list(losses)
        found = {
            name: fmean(by[p] for p in judged) for name, by in (("plain", plain), ("calibrated", losses))
        }
        kept = min(found, key=lambda name: found[name])  # plain on a tie
        if kept == "calibrated":
            with suppress(OtaroError):  # no decoder serves it: then there is no decoder.json
                write_decoder_file(packed)
            identity = NestedDirectory(packed).model
            with new_directory(out / "nested", overwrite=True) as directory:
                for path in packed.iterdir():
                    path.rename(directory / path.name)
                carry_over(out / "nested", directory, identity, REPLACED)
    except (OtaroError, MemoryError, torch.OutOfMemoryError) as error:
        console.remark(f"--calibrate: left out, {out / 'nested'} is packed plainly: {brief(error)}")
        return None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return {**found, "kept": kept}, losses
