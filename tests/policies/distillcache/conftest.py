"""The tiny model that DistillCache's trainings are tested on."""

from typing import Any

import pytest

from evictbench.cache import attention


@pytest.fixture
def model(tiny_llama: Any) -> Any:
    model = tiny_llama(dtype="float64").requires_grad_(False)
    attention.use(model)
    return model
