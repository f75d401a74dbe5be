"""Packed linear layers give what torch's give, and give way where a gradient, a change or a copy asks for it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from evictbench.models.packed_linear import PackedLinear, pack_linears, packed_dtypes
from twin.tiny import tiny_model

MUCH = 2**40


def layer(inputs: int = 24, outputs: int = 40, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias, dtype=dtype)


@settings(deadline=None)
@given(
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 70),
    shape=st.lists(st.integers(1, 5), min_size=0, max_size=3),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_it_is_torchs_linear(inputs: int, outputs: int, shape: list[int], bias: bool, dtype: torch.dtype) -> None:
    plain = layer(inputs, outputs, bias, dtype)
    packed = copy.deepcopy(plain)
    expected = plain.weight.nbytes if dtype in packed_dtypes() else 0
    assert pack_linears(nn.Sequential(packed), MUCH) == expected
    given = torch.randn(*shape, inputs).to(dtype)
    with torch.inference_mode():
        wanted, output = plain(given), packed(given)
    assert output.shape == wanted.shape
    torch.testing.assert_close(output, wanted, **({} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.02}))


def test_a_rows_result_does_not_depend_on_the_rows_beside_it() -> None:
    packed = layer(576, 192)
    pack_linears(nn.Sequential(packed), MUCH)
    rows = torch.randn(32, 576)
    with torch.inference_mode():
        together = packed(rows)
        for count in (1, 2, 8):
            assert torch.equal(packed(rows[:count].clone()), together[:count])


def test_a_model_is_packed_whole_and_answers_the_same() -> None:
    plain = tiny_model().float()
    packed = copy.deepcopy(plain)
    assert pack_linears(packed, MUCH) > 0
    assert all(isinstance(module, PackedLinear) for module in packed.modules() if isinstance(module, nn.Linear))
    tokens = torch.arange(12)[None]
    with torch.inference_mode():
        torch.testing.assert_close(packed(tokens).logits, plain(tokens).logits)


def test_a_weight_that_changes_is_used_as_it_is() -> None:
    packed = layer()
    pack_linears(nn.Sequential(packed), MUCH)
    given = torch.randn(3, 24)
    with torch.no_grad():
        packed.weight.mul_(2)
        torch.testing.assert_close(packed(given), nn.functional.linear(given, packed.weight, packed.bias))
        packed.weight.data = torch.zeros_like(packed.weight)
        assert torch.equal(packed(given), packed.bias.expand(3, -1))


def test_gradients_flow() -> None:
    packed = layer()
    pack_linears(nn.Sequential(packed), MUCH)
    packed(torch.randn(3, 24)).sum().backward()
    assert packed.weight.grad is not None


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_goes_on_with_the_weight(duplicate) -> None:  # type: ignore[no-untyped-def]
    packed = layer()
    pack_linears(nn.Sequential(packed), MUCH)
    given = torch.randn(3, 24)
    with torch.inference_mode():
        torch.testing.assert_close(duplicate(packed)(given), packed(given))


def test_nothing_is_packed_without_room_or_in_another_dtype_or_class() -> None:
    class Own(nn.Linear):
        pass

    assert pack_linears(nn.Sequential(layer()), 100) == 0
    assert pack_linears(nn.Sequential(layer(dtype=torch.float16), Own(3, 3)), MUCH) == 0


def test_autocast_and_another_dtype_go_to_torch() -> None:
    packed = layer()
    pack_linears(nn.Sequential(packed), MUCH)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert packed(torch.randn(3, 24)).dtype == torch.bfloat16
