"""The program in docs/native.md, compiled as C and run."""

import re
import shutil
import subprocess

import otaro
from otaro.runtime.decode import Decoder
from otaro.runtime.decoder_file import write_decoder_file
from otaro.runtime.load import load_tokenizer
from tests.native.conftest import ROOT


def test_the_example_says_what_the_package_says(compiler, library_path, tiny, tmp_path):
    directory = shutil.copytree(tiny, tmp_path / "tiny")
    write_decoder_file(directory)
    source, program = tmp_path / "example.c", tmp_path / "example"
    source.write_text(re.findall(r"```c\n(.*?)```", (ROOT / "docs" / "native.md").read_text(), re.DOTALL)[0])
    flags = [
        "-x",
        "c",
        "-std=c99",
        "-Wall",
        "-Wextra",
        "-Werror",
        f"-I{ROOT / 'native'}",
        source,
        "-x",
        "none",
    ]
    subprocess.run(
        [compiler, *flags, library_path, f"-Wl,-rpath,{library_path.parent}", "-o", program], check=True
    )
    said = subprocess.run([program, directory, "The list"], capture_output=True, timeout=120)
    assert said.returncode == 0, said.stderr
    model, tokenizer = otaro.load(directory), load_tokenizer(directory)
    decoder = Decoder.of(model)
    cache, ids = decoder.new_cache(), tokenizer("The list")["input_ids"]
    logits, made = decoder.forward(ids, cache), []
    for _ in range(20):
        if len(made) == 10:
            otaro.set_precision(model, "E5M3")
        made.append(int(logits.argmax()))
        logits = decoder.forward(made[-1:], cache)
    assert said.stdout.decode() == tokenizer.decode(made, skip_special_tokens=True)
    for text, words in (
        ("", b"the text holds no token"),
        ("list " * 600, b"more than 512 tokens"),
        (b"\xff", b"UTF-8"),
    ):
        refused = subprocess.run([program, directory, text], capture_output=True)
        assert (refused.returncode, refused.stdout) == (1, b"")
        assert words in refused.stderr
    assert subprocess.run([program], capture_output=True).returncode == 2
    refused = subprocess.run([program, tmp_path, "x"], capture_output=True)
    assert refused.returncode == 1
    assert b"is no nested model" in refused.stderr
