"""`otaro demo`: the main job end to end on the built-in model, without any download."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from otaro.cli import console

if TYPE_CHECKING:
    from otaro.file.summary import Summary

PROMPT = "The built-in function returns"
WINDOW = 512


def demo(
    out: Annotated[Path, typer.Option(help="Where the nested model goes; replaced if it exists.")] = Path("demo/model"),
    json: console.JsonOption = False,
) -> None:
    """Pack the built-in model, run it at all six precisions, and show size, perplexity and a sample of text."""
    from otaro.file.pack import pack
    from otaro.file.summary import summarize

    console.quiet_transformers()
    with console.progress_bar("packing (thousand weights)", 1000) as progress:
        nested = pack("builtin", out, overwrite=True, progress=progress)
    summary = summarize(nested)
    perplexities, samples = _run(out)
    if json:
        sizes = {row.precision: row.bytes for row in summary.precisions}
        console.print_json({"out": str(out), "bytes": sizes, "perplexity": perplexities, "samples": samples})
    else:
        _show(summary, perplexities, samples)
        console.out.print(f"\nThe model is in {out}. To hear more of it:", highlight=False)
        tool = Path(sys.executable).with_name("otaro")
        command = f"  {os.path.relpath(tool)} generate {out} --precision E5M4 --prompt 'The statement'"
        console.out.print(command, highlight=False, soft_wrap=True)


def _run(directory: Path) -> tuple[dict[str, float], dict[str, str]]:
    """Perplexity of the original and of each precision, and a continuation at the finest and the coarsest."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import otaro
    from otaro.builtin import MODEL_DIR, heldout_text
    from otaro.evaluate.perplexity import perplexity

    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer(heldout_text(), return_tensors="pt", verbose=False)["input_ids"][0]
    original = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    model = otaro.load(directory)
    perplexities: dict[str, float] = {}
    samples: dict[str, str] = {}
    with console.progress_bar("perplexity on held-out text (tokens)") as progress:
        runs: list[tuple[str, Any]] = [("FP16", original), *((str(p), model) for p in otaro.PRECISIONS)]
        for number, (name, runner) in enumerate(runs):
            if runner is model:
                otaro.set_precision(model, name)

            def report(done: int, total: int, name: str = name, number: int = number) -> None:
                progress(name, number * total + done, len(runs) * total)

            perplexities[name] = perplexity(runner, ids, window=WINDOW, progress=report)
    for precision in (otaro.PRECISIONS[0], otaro.PRECISIONS[-1]):
        otaro.set_precision(model, precision)
        prompt = tokenizer(PROMPT, return_tensors="pt")
        text = model.generate(**prompt, max_new_tokens=60, do_sample=False, repetition_penalty=1.3)
        samples[str(precision)] = tokenizer.decode(text[0], skip_special_tokens=True)
    return perplexities, samples


def _show(summary: Summary, perplexities: dict[str, float], samples: dict[str, str]) -> None:
    from rich.table import Table

    fp16_bytes = 2 * (summary.packed_weights + summary.other_parameters)
    full = perplexities["FP16"]
    table = Table(title="One file, six precisions: the built-in model on text it has not seen", title_justify="left")
    table.add_column("precision")
    for heading in ("bits per weight", "size", "of FP16", "perplexity", "cost"):
        table.add_column(heading, justify="right")
    table.add_row("FP16", "16.00", console.size(fp16_bytes), "100.0%", f"{full:.2f}", "")
    for row in summary.precisions:
        assert row.bytes is not None and row.ratio_to_fp16 is not None  # noqa: PT018 (just packed, so complete)
        worse = perplexities[row.precision]
        cells = (f"{row.bits_per_weight:.2f}", console.size(row.bytes), f"{row.ratio_to_fp16:.1%}")
        table.add_row(row.precision, *cells, f"{worse:.2f}", f"{worse / full - 1:+.1%}")
    console.out.print(table)
    for precision, text in samples.items():
        console.out.print(f"\n[bold]{precision}[/] continues [italic]{PROMPT}[/]", highlight=False)
        console.out.print(console.escape(text[len(PROMPT) :].strip()), highlight=False)
