"""peers.py without a GPU: what it says where something is missing."""

import peers
import pytest


@pytest.mark.parametrize("name", ["anybcq", "matgptq"])
def test_a_folder_without_their_sources_is_refused_in_words(tmp_path, name):
    with pytest.raises(SystemExit, match=f"--{name}: there is no {tmp_path}.*give the folder of a checkout"):
        next(getattr(peers, name)(tmp_path, tmp_path, "90"))
    assert not list(tmp_path.iterdir())
