"""A worker's facts about itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fp8plan.runtime.worker import facts


@pytest.mark.parametrize("number", [0, 1, 3, 4, 63, 64, 65, 1001])
def test_a_digest_is_the_sum_of_words_times_their_places(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(number)
    tensor = torch.randint(0, 256, (number,), dtype=torch.uint8)
    words = np.frombuffer(tensor.numpy().tobytes() + bytes(-number % 4), np.int32)
    expected = sum(int(word) * place for place, word in enumerate(words, 1)) % 2**64
    assert facts.digest(tensor) == expected
    monkeypatch.setattr(facts, "PART", 64)
    assert facts.digest(tensor) == expected
    if number:
        tensor[number // 2] ^= 1
        assert facts.digest(tensor) != expected
