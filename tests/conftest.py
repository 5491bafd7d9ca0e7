"""Settings of the whole suite."""

import pytest
import torch

# the models are tiny: a second thread costs more than it brings, and far more on a busy machine
torch.set_num_threads(1)


@pytest.fixture
def _fresh_cache(tmp_path, monkeypatch):
    """Triton compiles anew."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
