from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from executor.estimating.counting import Kind, Operator, Stage, operators_of
from executor.estimating.substitutes import CudaFunctions

META = torch.device("meta")


def tensor(*shape: int, trained: bool = True, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, device=META, dtype=dtype, requires_grad=trained)


def back_and_forth(work: Callable[[], Tensor]) -> list[Operator]:
    def there_and_back() -> None:
        y = work()
        y.backward(torch.empty_like(y))

    return operators_of(there_and_back)


def total(operators: list[Operator], kind: Kind, stage: Stage) -> int:
    return sum(each.flops for each in operators if (each.kind, each.stage) == (kind, stage))


class TestFlops:
    def test_of_a_linear_map_are_a_product_forward_and_two_back(self):
        n, k, m = 6, 5, 7
        x, weight, bias = tensor(n, k), tensor(m, k), tensor(m)
        ran = back_and_forth(lambda: functional.linear(x, weight, bias))
        assert total(ran, Kind.MATMUL, Stage.RECORDING) == 2 * n * k * m
        assert total(ran, Kind.MATMUL, Stage.BACKWARD) == 2 * (2 * n * k * m)
        with torch.no_grad():
            (forward,) = operators_of(lambda: functional.linear(x, weight, bias))
        assert forward == Operator("addmm", Kind.MATMUL, Stage.FORWARD, 2 * n * k * m, 4 * (n * k + k * m + m + n * m))

    def test_of_a_convolution_are_those_of_its_windows(self):
        n, narrow, wide, height, kernel = 2, 3, 8, 10, 3
        x, weight = tensor(n, narrow, height, height), tensor(wide, narrow, kernel, kernel)
        ran = back_and_forth(lambda: functional.conv2d(x, weight, padding=1))
        of_one = 2 * n * height**2 * wide * narrow * kernel**2
        assert total(ran, Kind.CONVOLUTION, Stage.RECORDING) == of_one
        assert total(ran, Kind.CONVOLUTION_BACKWARD, Stage.BACKWARD) == 2 * of_one

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("causal", [False, True])
    def test_of_fused_attention_are_two_products_forward_and_five_back(self, causal: bool, dtype: torch.dtype):
        n, heads, length, width = 2, 3, 16, 8
        query, key, value = (tensor(n, heads, length, width, dtype=dtype) for _ in range(3))
        with CudaFunctions(fused_attention=True):
            ran = back_and_forth(lambda: functional.scaled_dot_product_attention(query, key, value, is_causal=causal))
        product = 2 * n * heads * length**2 * width // (2 if causal else 1)
        assert not any(each.kind is Kind.BATCHED_MATMUL for each in ran)
        assert total(ran, Kind.ATTENTION, Stage.RECORDING) == 2 * product
        assert total(ran, Kind.ATTENTION, Stage.BACKWARD) == 5 * product

    def test_of_unfused_attention_are_those_of_its_products(self):
        n, heads, length, width = 2, 3, 16, 8
        query = tensor(n, heads, length, width)
        with CudaFunctions(fused_attention=False):
            ran = back_and_forth(lambda: functional.scaled_dot_product_attention(query, query, query))
        product = 2 * n * heads * length**2 * width
        assert total(ran, Kind.BATCHED_MATMUL, Stage.RECORDING) == 2 * product
        assert total(ran, Kind.BATCHED_MATMUL, Stage.BACKWARD) == 4 * product

    def test_of_queries_that_share_keys_and_a_mask(self):
        n, heads, length, width = 2, 4, 16, 8
        query, shared = tensor(n, heads, length, width), tensor(n, 2, length, width)
        mask = torch.empty(n, 1, length, length, device=META, dtype=torch.bool)
        with CudaFunctions(fused_attention=True):
            ran = back_and_forth(
                lambda: functional.scaled_dot_product_attention(query, shared, shared, mask, enable_gqa=True)
            )
        assert total(ran, Kind.ATTENTION, Stage.RECORDING) == 4 * n * heads * length**2 * width


class TestBytes:
    def test_are_read_and_written_once(self):
        x, y = tensor(4, 6, trained=False), tensor(6, trained=False)
        (add,) = operators_of(lambda: x + y)
        assert add.bytes == 4 * (24 + 6 + 24)

    def test_of_what_repeats_are_read_from_one_place(self):
        x, y = tensor(4, 6, trained=False), tensor(6, trained=False).expand(4, 6)
        (add,) = operators_of(lambda: x + y)
        assert add.bytes == 4 * (24 + 6 + 24)

    def test_of_a_table_are_only_those_looked_up(self):
        table, at = tensor(1000, 8), torch.empty(3, device=META, dtype=torch.int64)
        with torch.no_grad():
            (embedding,) = operators_of(lambda: functional.embedding(at, table))
        assert embedding.bytes == 4 * 3 * 8 + 3 * 8 + 4 * 3 * 8

    def test_of_views_and_empty_memory_are_none(self):
        x = tensor(4, 6)
        assert operators_of(lambda: torch.empty_like(x.detach().view(6, 4).t()[1:])) == []


class TestCuda:
    def test_dropout_is_one_operator_and_keeps_a_mask_of_bytes(self):
        x = tensor(4, 6)
        with CudaFunctions(fused_attention=False):
            ran = back_and_forth(lambda: nn.Dropout(0.1)(x))
            unchanged = operators_of(lambda: nn.Dropout(0.1).eval()(x))
        assert [each.name for each in ran] == ["native_dropout", "native_dropout_backward"]
        assert ran[0].bytes == 4 * 24 + 4 * 24 + 24
        assert unchanged == []
