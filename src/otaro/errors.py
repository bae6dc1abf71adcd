"""Everything OTARo refuses, one class per kind of refusal.

All derive from `OtaroError`, so `except otaro.OtaroError` catches whatever the library itself decided not to
do and lets genuine bugs through. The command line prints their message alone, without a traceback.
"""

import os
import shlex
import sys

DISTRIBUTION = "otaro-llm"  # what package registries know this package as: `otaro` there is a stranger's


class OtaroError(Exception):
    """Base of every refusal; its message says what was wrong and what to do."""


class PrecisionError(OtaroError, ValueError):
    """A precision that does not exist, or a precision map that does not fit the model."""


class WeightError(OtaroError, ValueError):
    """A weight that SEFP cannot hold: NaN, infinity, too large, or not a floating-point tensor."""


class CheckpointError(OtaroError):
    """The model to be packed cannot be read, or is not of a kind that can be packed."""


class FormatError(OtaroError):
    """A nested directory or shard breaks the rules of FORMAT.md."""


class ShardMissingError(FormatError):
    """A precision was asked for whose shard is not in the directory."""


class DigestError(FormatError):
    """The bytes of a shard are not those its header promises."""


class FetchError(OtaroError):
    """A model could not be had from where it lies; what has come of it is kept."""


class TargetError(OtaroError):
    """The place to write to cannot be used: it exists, is read-only, or is full."""


class KernelError(OtaroError, ValueError):
    """Arguments that do not fit a packed weight, or kernels asked for that this machine cannot run."""


class OtaroWarning(UserWarning):
    """Not a refusal: what was asked for is done, but a user should know. Commands print its text alone."""


class SlowWarning(OtaroWarning):
    """It is done slowly. Says why, and what to do about it where something can be done."""


class PositionsWarning(OtaroWarning):
    """Text has come to the end of the positions that a model has, or was made for."""


def install(extra: str) -> str:
    """The command that brings the packages of an extra."""
    return pip_install(f"'{DISTRIBUTION}[{extra}]'")


def pip_install(what: str) -> str:
    """The command that installs this: by the Python that runs, as the shell's pip may be another's."""
    if not (python := sys.executable):
        return f"python -m pip install {what}"
    try:
        nearby = os.path.relpath(python)  # links are kept: that of an environment is what makes it one
    except (OSError, ValueError):  # the current folder is gone; another drive
        nearby = python
    if not nearby.startswith((os.pardir, os.sep)):
        below = nearby if os.sep in nearby else os.curdir + os.sep + nearby
        python = min(below, python, key=len)
    return f"{shlex.quote(python)} -m pip install {what}"


def brief(error: BaseException) -> str:
    """The first line of another library's error message."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
