"""Models on the Hub: how to reach it, and the planes of a nested model, from the commit that its base shard
came from.

A plane that could not be fetched is not a plane that the repository lacks. Without a precision asked for, a
model runs at the finest one its repository has; if that cannot be told, offline say, it is refused. The Hub's
cache remembers which files a commit lacks, so what was once fetched whole opens offline too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from otaro.errors import CheckpointError, ShardMissingError, brief
from otaro.file.header import BASE, shard_name
from otaro.sefp.precision import FINEST, Precision, of_mantissa_bits


@dataclass(frozen=True)
class Hub:
    """How to reach the Hub; what is not said, its environment variables say (HF_TOKEN, HF_HOME, ...)."""

    revision: str | None = None
    """A branch, a tag or a commit."""
    token: str | bool | None = field(default=None, repr=False)
    cache_dir: str | os.PathLike[str] | None = None
    local_files_only: bool = False
    force_download: bool = False

    def snapshot(self, model: str, patterns: Sequence[str]) -> Path:
        """The cache's directory with a repository's files, those that match fetched; all of one commit."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError

        if model.endswith(".gguf"):
            raise CheckpointError(f"there is no file {model}")
        try:
            return Path(
                snapshot_download(
                    model,
                    allow_patterns=list(patterns),
                    revision=self.revision,
                    token=self.token,
                    cache_dir=None if self.cache_dir is None else Path(self.cache_dir),
                    local_files_only=self.local_files_only,
                    force_download=self.force_download,
                )
            )
        except HFValidationError:
            raise CheckpointError(f"{model} is neither a directory nor a Hub id (owner/name)") from None
        except Exception as error:  # whatever the network and the Hub come up with
            raise CheckpointError(_why_not(model, self.revision, error)) from error

    def files(self, model: str) -> tuple[str, list[str]]:
        """The commit that the revision stands for now, and the names of its files."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HFValidationError

        try:
            info = HfApi().model_info(model, revision=self.revision, token=self.token)
        except HFValidationError:
            raise CheckpointError(
                f"{model} is neither a directory, a URL nor a Hub id (owner/name)"
            ) from None
        except Exception as error:  # whatever the network and the Hub come up with
            raise CheckpointError(_why_not(model, self.revision, error)) from error
        if info.sha is None:
            raise CheckpointError(
                f"the Hub does not say which commit {model} is at; ask for one by its revision"
            )
        return info.sha, [file.rfilename for file in info.siblings or ()]

    def address(self, model: str, commit: str, name: str) -> tuple[str, dict[str, str]]:
        """Where a file of a commit lies, and what to send along."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        return hf_hub_url(model, name, revision=commit), build_hf_headers(token=self.token)

    def fetch_planes(self, model: str, base: Path, precision: Precision | None) -> None:
        """Fetch what `precision` needs beside the base shard of `model`; without one, all planes of the
        repository.

        Where they come from and go to is told by where the base shard lies, so that they are of the same
        commit.
        """
        from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache
        from huggingface_hub.errors import RemoteEntryNotFoundError

        cache, commit, subfolder = _place_in_cache(model, base)
        for plane in range(BASE + 1, (precision.mantissa_bits if precision else FINEST) + 1):
            name = shard_name(plane)
            path = f"{subfolder}/{name}" if subfolder else name
            known = try_to_load_from_cache(model, path, cache_dir=cache, revision=commit)
            lacking = known is _CACHED_NO_EXIST and not self.force_download
            complete = of_mantissa_bits(plane - 1)
            try:
                if not lacking:
                    hf_hub_download(
                        model,
                        path,
                        revision=commit,
                        cache_dir=cache,
                        token=self.token,
                        local_files_only=self.local_files_only,
                        force_download=self.force_download,
                    )
            except RemoteEntryNotFoundError:
                lacking = True
            except Exception as error:  # as above
                raise CheckpointError(
                    f"{path} of {model} could not be fetched: {brief(error)} "
                    f"What is there is complete up to {complete}; to run that, ask for it by name"
                ) from error
            if lacking and precision is None:
                return
            if lacking:
                raise ShardMissingError(
                    f"{precision} needs {path}, which {model} at {commit[:12]} lacks; ask for {complete} or "
                    "a lower one"
                )


def _why_not(model: str, revision: str | None, error: Exception) -> str:
    """Why a model that is not here is not to be had from the Hub either, and what to do about it."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    cause: BaseException = error
    if isinstance(error, LocalEntryNotFoundError):  # "nor in the cache", whatever it was
        cause = error.__cause__ or error
    said = f"({brief(cause)})"
    if isinstance(cause, GatedRepoError):
        why = f"the Hub gives {model} to who accepted its terms; do so on its page, and give a token {said}"
    elif isinstance(cause, RepositoryNotFoundError):
        why = f"the Hub has no {model} for you: check the name; a private model needs a token {said}"
    elif isinstance(cause, RevisionNotFoundError):
        why = f"{model} on the Hub has no revision {revision}; name a branch, a tag or a commit of it {said}"
    elif isinstance(cause, OfflineModeIsEnabled):
        why = "the Hub's cache has not all of it; unset HF_HUB_OFFLINE to fetch it, or give a directory"
    elif cause is error and isinstance(error, LocalEntryNotFoundError):
        why = "the Hub's cache has not all of it, and nothing else was to be asked; give a directory"
    elif isinstance(cause, HfHubHTTPError):
        why = f"the Hub answered with an error; try again later, or give a directory {said}"
    else:
        why = (
            "the Hub could not be reached (no network?); give a directory, or set HF_ENDPOINT to a mirror "
            f"that can be reached {said}"
        )
    if "/" in model:
        return f"there is no directory {model} here, and {why}"
    return f"there is no directory {model} here. If a model of this name on the Hub is meant: {why}"


def _place_in_cache(model: str, base: Path) -> tuple[Path, str, str]:
    """Cache, commit and subfolder of a base shard, which lies at
    CACHE/models--OWNER--NAME/snapshots/COMMIT/SUBFOLDER/.
    """
    for folder in base.parents:
        if folder.parent.name == "snapshots" and folder.parent.parent.name == "models--" + model.replace(
            "/", "--"
        ):
            return folder.parents[2], folder.name, "/".join(base.parent.relative_to(folder).parts)
    raise CheckpointError(
        f"{base} does not lie in a cache of {model}, so where its other shards are cannot be told"
    )
